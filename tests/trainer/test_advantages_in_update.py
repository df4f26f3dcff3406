"""Penalties are taken from rewards before answers are compared, and all ranks compare the same."""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.trainer import reference
from tests.trainer.models import CPU, learner, never_interrupt, samples, share, spec, whole
from tests.trainer.second_rank import Peer
from tlt.errors import ConfigError
from tlt.policies.algorithm.advantages import Scored, compute_advantages
from tlt.spec.config import AlgorithmSpec
from tlt.trainer import process_group as groups
from tlt.trainer.policy.loss.advantages_in_update import Penalised, Ranks, advantages_in_update
from tlt.trainer.policy.model.micro_batches import PolicySample, build_micro_batches

LENGTHS, REWARDS = [6, 4, 3, 1], [1.0, 0.0, 0.5, 0.5]
PENALTIES = [[0.1 * (i + 1) - 0.05 * t for t in range(n)] for i, n in enumerate(LENGTHS)]


def advantages(made: AlgorithmSpec) -> list[list[float]]:
    """Return the advantages of all tokens, by answer; two answers are a group."""
    answers = [
        PolicySample(
            prompt=(1,),
            completion=(2,) * length,
            logprobs=(-1.0,) * length,
            temperature=1.0,
            advantage=0.0,
            reward=reward,
            group=index // 2,
        )
        for index, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True))
    ]
    (batch,) = build_micro_batches(answers, 10_000, CPU, packed=True)
    penalty = torch.tensor([value for part in PENALTIES for value in part], dtype=torch.float64)
    (found,) = advantages_in_update(made, None, [Penalised(batch, penalty)], Ranks(None, CPU))
    return [part.tolist() for part in found.advantage.split(LENGTHS)]


def test_reinforce_takes_the_penalty_before_it_whitens_the_tokens_of_the_batch() -> None:
    returns = [
        [reward - sum(part[t:]) for t in range(len(part))]
        for reward, part in zip(REWARDS, PENALTIES, strict=True)
    ]
    flat = [value for part in returns for value in part]
    mean, deviation = statistics.mean(flat), statistics.stdev(flat)
    expected = [[(value - mean) / deviation for value in part] for part in returns]
    found = advantages(spec(advantage="batch", kl_in="reward", kl_coefficient=0.1))
    for part, wanted in zip(found, expected, strict=True):
        assert part == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("name", ["group", "leave_one_out", "group_batch"])
def test_a_group_is_compared_by_rewards_less_penalties(name: str) -> None:
    left = [
        Scored(reward - sum(part), len(part))
        for reward, part in zip(REWARDS, PENALTIES, strict=True)
    ]
    first, second = compute_advantages([left[:2], left[2:]], name, True)
    assert first is not None
    assert second is not None
    found = advantages(spec(advantage=name, kl_in="reward", kl_coefficient=0.1))
    for part, wanted in zip(found, [*first, *second], strict=True):
        assert part == pytest.approx([wanted] * len(part), rel=1e-4)


def rewarded(count: int, seed: int) -> list[PolicySample]:
    """Make samples in groups of two whose rewards differ."""
    return [
        replace(sample, advantage=0.0, reward=float(index % 2), group=100 * seed + index // 2)
        for index, sample in enumerate(samples(count, seed))
    ]


PARTS = [rewarded(8, 1), rewarded(6, 2)]
CHANGES: dict[str, Any] = {
    "kl_in": "reward",
    "kl_coefficient": 2.0,
    "learning_rate": 1e-2,
    "gradient_clip": 0.5,
    "minibatches": 2,
}


def test_the_penalty_is_that_before_the_first_step_in_all_minibatches(
    model_dir: str, tmp_path: Path
) -> None:
    """The second update is made again with advantages from naive log-probs."""
    learns = learner(model_dir, **CHANGES)
    learns.update(0, [whole(part) for part in PARTS], None, never_interrupt)
    weights = {name: tensor.clone() for name, tensor in learns.weights().items()}
    state = {name: tensor.clone() for name, tensor in learns.optimiser_state().items()}
    learns.update(1, [whole(part) for part in PARTS], None, never_interrupt)

    model, frozen = reference.load(model_dir), reference.load(model_dir)
    model.load_state_dict({k: v.double() for k, v in weights.items()}, strict=False)
    with torch.no_grad():
        taken = [
            2.0 * (reference.logprobs(model, s)[0] - reference.logprobs(frozen, s)[0]).sum().item()
            for part in PARTS
            for s in part
        ]
    assert max(map(abs, taken)) > 0.1
    everything = [sample for part in PARTS for sample in part]
    scored = [
        Scored(s.reward - t, len(s.completion)) for s, t in zip(everything, taken, strict=True)
    ]
    pairs = [scored[i : i + 2] for i in range(0, len(scored), 2)]
    found = [a for pair in compute_advantages(pairs, "group", True) for a in pair or [0.0, 0.0]]
    told = iter([replace(s, advantage=a) for s, a in zip(everything, found, strict=True)])
    again = learner(model_dir, **{**CHANGES, "kl_coefficient": 0.0, "kl_in": "loss"})
    again.load_weights(weights)
    again.load_optimiser_state(state)
    again.update(1, [whole([next(told) for _ in part]) for part in PARTS], None, never_interrupt)
    for name, tensor in again.weights().items():
        torch.testing.assert_close(learns.weights()[name], tensor, rtol=0, atol=2e-4)


def update_as(rank: int, rendezvous: str, folder: str, name: str, saved: Path) -> None:
    """Make two updates, because the first one's penalties are 0."""
    learns = learner(folder, advantage=name, **CHANGES)
    cuts = [5, 2]
    minibatches = [
        share(part[:cut] if rank == 0 else part[cut:], part)
        for part, cut in zip(PARTS, cuts, strict=True)
    ]
    group = groups.join_group(rendezvous, name, rank, 2, 30.0, CPU)
    for step in range(2):
        learns.update(step, minibatches, group, never_interrupt)
    groups.leave_group()
    save_file(dict(learns.weights()), saved)


@pytest.mark.parametrize("name", ["batch", "group"])
def test_two_ranks_compare_the_answers_of_both(
    peer: Peer, rendezvous: str, model_dir: str, tmp_path: Path, name: str
) -> None:
    """Groups are split between the ranks."""
    files = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    peer.tell(update_as, 1, rendezvous, model_dir, name, files[1])
    update_as(0, rendezvous, model_dir, name, files[0])
    peer.answer()
    alone = learner(model_dir, advantage=name, **CHANGES)
    for step in range(2):
        alone.update(step, [whole(part) for part in PARTS], None, never_interrupt)
    first, second = (load_file(file) for file in files)
    for key, tensor in alone.weights().items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], tensor, rtol=0, atol=1e-4)


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_loss"
OWN = """
import torch
from tlt.trainer.policy.loss.loss_variants import clipped as built_in

def clipped(spec, batch, current, old):
    return built_in(spec, batch, current, old).loss

def centred(rewards, groups, lengths):
    means = torch.zeros(int(groups.max()) + 1, dtype=rewards.dtype)
    counts = means.index_add(0, groups, torch.ones_like(rewards))
    return rewards - (means.index_add(0, groups, rewards) / counts)[groups]

def too_few(rewards, groups, lengths):
    return rewards[:1]

def not_finite(rewards, groups, lengths):
    return rewards / 0

def scalar(spec, batch, current, old):
    return current.sum()

def broken(spec, batch, current, old):
    raise ValueError("no such thing")
"""


def updated(folder: str, **changes: Any) -> dict[str, Tensor]:
    learns = learner(folder, **changes)
    learns.update(0, [whole(part) for part in PARTS], None, never_interrupt)
    return {name: tensor.clone() for name, tensor in learns.weights().items()}


def test_a_loss_of_ones_own_is_used_as_a_built_in_one(model_dir: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    parts = [whole(samples(6, seed)) for seed in (1, 2)]
    weights: list[dict[str, Tensor]] = []
    for name in ("clipped", f"{tmp_path}/own.py:clipped"):
        learns = learner(model_dir, loss=name)
        learns.update(0, parts, None, never_interrupt)
        weights.append(dict(learns.weights()))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_an_advantage_of_ones_own_is_used_as_a_built_in_one(model_dir: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = updated(model_dir, advantage=f"{tmp_path}/own.py:centred")
    told = learner(model_dir)
    parts = [[replace(s, advantage=s.reward - 0.5) for s in part] for part in PARTS]
    told.update(0, [whole(part) for part in parts], None, never_interrupt)
    assert all(torch.equal(own[name], tensor) for name, tensor in told.weights().items())


def test_the_examples_functions_learn_what_the_built_in_ones_learn(model_dir: str) -> None:
    built_in = updated(model_dir, **CHANGES)
    own = updated(
        model_dir,
        **CHANGES,
        loss=f"{EXAMPLE}/grpo.py:loss",
        advantage=f"{EXAMPLE}/grpo.py:advantage",
    )
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, built_in[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("key", "function", "complaint"),
    [
        ("advantage", "too_few", r"algorithm.advantage: .*own.py:too_few returned a tensor of"),
        ("advantage", "not_finite", r"own.py:not_finite returned a number that isn't finite"),
        ("loss", "scalar", r"algorithm.loss: .*own.py:scalar returned a tensor of \(\)"),
        ("loss", "broken", r"algorithm.loss: .*own.py:broken: ValueError: no such thing"),
        ("loss", "absent", r"algorithm.loss: .*own.py has no function 'absent'"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_by_its_key(
    model_dir: str, tmp_path: Path, key: str, function: str, complaint: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(ConfigError, match=complaint):
        updated(model_dir, **{key: f"{tmp_path}/own.py:{function}"})
