"""An adapter learns what peft's own would, and the weights beside it never change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.trainer import reference
from tests.trainer.models import (
    CPU,
    PATHS,
    copies,
    never_interrupt,
    samples,
    save_llama,
    share,
    spec,
    whole,
)
from tests.trainer.second_rank import Peer
from tlt.errors import ConfigError
from tlt.kernels.training_kernels import load_kernels
from tlt.protocol.shared_values import UpdateMetrics
from tlt.spec.config import LoraSpec
from tlt.trainer import process_group as groups
from tlt.trainer.policy.model.micro_batches import Minibatch
from tlt.trainer.policy.model.trained_part import TrainedPart
from tlt.trainer.policy.policy_learner import PolicyLearner
from tlt.trainer.policy.speed.fused_layers import fuse, unfuse

RATE = 5e-3
LORA = LoraSpec(rank=4, alpha=8)


def adapted(folder: str, lora: LoraSpec = LORA, **changes: Any) -> PolicyLearner:
    settings = spec(**{"learning_rate": RATE, "attention": "padded"} | changes)
    return PolicyLearner(folder, settings, None, CPU, part=TrainedPart(lora=lora, seed=5))


def learn(learns: PolicyLearner, updates: int = 1, first: int = 0) -> UpdateMetrics:
    for step in range(first, first + updates):
        parts = [whole(samples(5, seed=2 * step)), whole(samples(6, seed=2 * step + 1))]
        metrics = learns.update(step, parts, None, never_interrupt)
    return metrics


def all_tensors(learns: PolicyLearner) -> dict[str, Tensor]:
    return copies(learns.adapter() | learns.optimiser_state() | dict(learns.weights()))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.3])
def test_an_update_is_that_of_peft_and_torch(model_dir: str, kl_coefficient: float):
    """The reference policy is a second model there, and the same one here."""
    learns = adapted(model_dir, kl_coefficient=kl_coefficient)
    settings = spec(kl_coefficient=kl_coefficient, learning_rate=RATE)
    theirs = get_peft_model(
        reference.load(model_dir), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    )
    start = {n.replace(".lora_A.", ".lora_A.default."): t for n, t in learns.adapter().items()}
    start = {n.replace(".lora_B.", ".lora_B.default."): t for n, t in start.items()}
    theirs.load_state_dict(start, strict=False)
    frozen = reference.load(model_dir) if kl_coefficient else None
    trained = [p for p in theirs.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=RATE, betas=settings.betas, weight_decay=0.0)
    for step in range(3):
        batch = samples(6, seed=step)
        metrics = learns.update(step, [whole(batch)], None, never_interrupt)
        with torch.no_grad():
            old = [reference.logprobs(theirs, sample)[0] for sample in batch]
        optimiser.zero_grad()
        loss = reference.loss(settings, theirs, batch, old, frozen)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, settings.gradient_clip)
        optimiser.step()
        assert metrics.loss == pytest.approx(loss.item(), rel=1e-3, abs=1e-5)
        assert metrics.gradient_norm == pytest.approx(norm.item(), rel=1e-3)
    merged = theirs.merge_and_unload().state_dict()
    for name, tensor in learns.weights().items():
        torch.testing.assert_close(tensor, merged[name].float(), rtol=0, atol=2e-4)


def test_only_the_adapter_has_gradients_and_moments(model_dir: str):
    learns = adapted(model_dir)
    before = copies(dict(learns.weights()))
    seen: list[set[str]] = []
    model = learns._models.policy  # pyright: ignore[reportPrivateUsage]

    def look() -> None:
        seen.append({name for name, p in model.named_parameters() if p.grad is not None})

    learns.update(0, [whole(samples(6))], None, look)
    adapter = learns.adapter()
    assert len(adapter) == 2 * 2 * 7
    assert all(".lora_" in name for names in seen for name in names)
    assert {len(names) for names in seen} == {len(adapter)}
    moments = learns.optimiser_state().keys() - {"step"}
    assert moments == {f"{name}.{m}" for name in adapter for m in ("exp_avg", "exp_avg_sq")}
    for name, tensor in learns.weights().items():
        assert torch.equal(tensor, before[name]) == ("_proj." not in name)


def test_the_reference_is_the_policy_without_its_adapter(model_dir: str):
    learns = adapted(model_dir, kl_coefficient=0.1)
    first = learns.update(0, [whole(samples(5))], None, never_interrupt)
    assert first.reference_kl == pytest.approx(0.0, abs=1e-6)
    learn(learns, 4, first=1)
    drawn = samples(6, seed=99)
    model, moved = reference.load(model_dir), reference.load(model_dir)
    moved.load_state_dict(dict(learns.weights()), strict=False)
    with torch.no_grad():
        gaps = [reference.logprobs(model, s)[0] - reference.logprobs(moved, s)[0] for s in drawn]
    gap = torch.cat(gaps)
    metrics = learns.update(5, [whole(drawn)], None, never_interrupt)
    assert metrics.reference_kl == pytest.approx((gap.exp() - 1 - gap).mean().item(), rel=1e-3)
    assert metrics.reference_kl is not None
    assert metrics.reference_kl > 1e-3


@pytest.mark.parametrize("attention", PATHS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
def test_every_attention_learns_the_same(model_dir: str, attention: str, checkpointing: bool):
    plain = adapted(model_dir)
    other = adapted(model_dir, attention=attention, gradient_checkpointing=checkpointing)
    learn(plain), learn(other)
    for name, tensor in plain.adapter().items():
        torch.testing.assert_close(other.adapter()[name], tensor, rtol=0, atol=2e-4)


def test_layers_with_an_adapter_are_fused(model_dir: str):
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("no C compiler")
    model = adapted(model_dir)._models.policy  # pyright: ignore[reportPrivateUsage]
    fuse(model, kernels)
    kinds = {type(module).__name__ for module in unfuse(model)}
    assert kinds == {"LlamaRMSNorm", "LlamaMLP"}


def test_saved_state_continues_to_the_bit(model_dir: str, tmp_path: Path):
    lora = LoraSpec(rank=4, dropout=0.2)
    first = adapted(model_dir, lora)
    learn(first, 2)
    save_file(first.adapter(), tmp_path / "adapter.safetensors")
    save_file(first.optimiser_state(), tmp_path / "optimiser.safetensors")
    second = adapted(model_dir, lora)
    second.load_adapter(load_file(tmp_path / "adapter.safetensors"))
    second.load_optimiser_state(load_file(tmp_path / "optimiser.safetensors"))
    for learns in (first, second):
        learn(learns, 2, first=2)
    assert same(all_tensors(first), all_tensors(second))


def test_dropout_changes_what_is_learned_but_no_score(model_dir: str):
    drawn = reference.drawn_by(model_dir, 6, seed=1)
    learned: dict[float, dict[str, Tensor]] = {}
    for rate in (0.0, 0.5):
        learns = adapted(model_dir, LoraSpec(rank=4, dropout=rate), old_logprobs="learner")
        learns.update(0, [whole(drawn), whole(samples(4))], None, never_interrupt)
        learned[rate] = all_tensors(learns)
        models = learns._models  # pyright: ignore[reportPrivateUsage]
        scores = [models.score(batch, 0)[0] for batch in models.micro_batches(drawn)]
        again = [models.score(batch, 1)[0] for batch in models.micro_batches(drawn)]
        assert all(torch.equal(a, b) for a, b in zip(scores, again, strict=True))
    assert not same(learned[0.0], learned[0.5])


def test_all_passes_of_an_update_drop_the_same_inputs(model_dir: str):
    """A step of 1e-12 changes nothing, so each ratio is 1 in later minibatches and epochs."""
    lora = LoraSpec(rank=4, dropout=0.5)
    tight = {"clip_low": 1e-4, "clip_high": 1e-4, "epochs": 2, "old_logprobs": "learner"}
    learns = adapted(model_dir, lora, **tight)
    learn(learns, 1)
    still = adapted(model_dir, lora, learning_rate=1e-12, **tight)
    still.load_adapter(copies(learns.adapter()))
    parts = [whole(samples(6, seed)) for seed in (1, 2)]
    metrics = still.update(0, parts, None, never_interrupt)
    assert metrics.optimiser_steps == 4
    assert metrics.clipped_low == metrics.clipped_high == 0.0


def test_named_modules_alone_get_an_adapter(tmp_path: Path):
    learns = adapted(save_llama(tmp_path), LoraSpec(targets=("q_proj", "0.mlp.up_proj")))
    layers = {
        name.partition(".lora_")[0].removeprefix("base_model.model.model.layers.")
        for name in learns.adapter()
    }
    assert layers == {"0.self_attn.q_proj", "1.self_attn.q_proj", "0.mlp.up_proj"}


@pytest.mark.parametrize(
    ("targets", "complaint"),
    [
        (("q_proj", "w1"), "no module w1"),
        (("w1", "w2"), "targets"),
        (("lm_head",), "only layers' matrices"),
        (("embed_tokens",), "only layers' matrices"),
    ],
)
def test_refuses_modules_that_cannot_have_one(
    tmp_path: Path, targets: tuple[str, ...], complaint: str
):
    folder = save_llama(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=complaint):
        adapted(folder, LoraSpec(targets=targets))


# --- two ranks


def dealt(step: int, rank: int | None) -> list[Minibatch]:
    drawn = [samples(7, seed=2 * step), samples(6, seed=2 * step + 1)]
    if rank is None:
        return [whole(part) for part in drawn]
    return [share(part[rank::2], part) for part in drawn]


def learn_as(rank: int, rendezvous: str, folder: str, saved: Path) -> list[UpdateMetrics]:
    """Learn two steps; the second rank begins with another adapter and gets the first's."""
    learns = adapted(folder, kl_coefficient=0.1)
    if rank == 1:
        for tensor in learns.adapter().values():
            tensor.fill_(7.0)
    group = groups.join_group(rendezvous, "lora", rank, 2, 60.0, CPU)
    learns.broadcast(0, group)
    metrics = [learns.update(step, dealt(step, rank), group, never_interrupt) for step in range(2)]
    groups.leave_group()
    save_file(learns.adapter(), saved)
    return metrics


def test_two_ranks_learn_what_one_learns(
    peer: Peer, rendezvous: str, model_dir: str, tmp_path: Path
):
    files = [tmp_path / f"{rank}.safetensors" for rank in range(2)]
    peer.tell(learn_as, 1, rendezvous, model_dir, files[1])
    ours = learn_as(0, rendezvous, model_dir, files[0])
    assert peer.answer() == ours
    first, second = (load_file(file) for file in files)
    assert same(first, second)
    alone = adapted(model_dir, kl_coefficient=0.1)
    for step, found in enumerate(ours):
        metrics = alone.update(step, dealt(step, None), None, never_interrupt)
        assert metrics.loss == pytest.approx(found.loss, abs=1e-5)
        assert metrics.gradient_norm == pytest.approx(found.gradient_norm, rel=1e-3)
    for name, tensor in alone.adapter().items():
        torch.testing.assert_close(first[name], tensor, rtol=0, atol=1e-4)
