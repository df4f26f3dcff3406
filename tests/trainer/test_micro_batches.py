import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.models import CPU, samples
from tlt.trainer.policy.model.micro_batches import PolicySample, build_micro_batches


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 30),
    budget=st.integers(1, 300),
    seed=st.integers(0, 99),
    packed=st.booleans(),
)
def test_every_completion_token_is_scored_once_within_the_budget(
    count: int, budget: int, seed: int, packed: bool
):
    chosen = samples(count, seed)
    batches = build_micro_batches(chosen, budget, CPU, packed)
    assert sum(batch.samples for batch in batches) == count
    assert all(batch.samples == 1 or batch.tokens.numel() <= budget for batch in batches)
    scored = sorted(token for batch in batches for token in batch.targets.tolist())
    assert scored == sorted(token for sample in chosen for token in sample.completion)


@pytest.mark.parametrize("packed", [False, True])
def test_positions_precede_their_targets(packed: bool):
    for batch in build_micro_batches(samples(12), 1, CPU, packed):
        known = batch.tokens.flatten()[batch.positions[1:]]
        torch.testing.assert_close(known, batch.targets[:-1])


def test_packed_row_has_no_padding_and_lists_where_samples_begin():
    chosen = samples(12)
    (batch,) = build_micro_batches(chosen, 10_000, CPU, packed=True)
    assert batch.bounds is not None
    lengths = sorted((sample.length - 1 for sample in chosen), reverse=True)
    assert batch.bounds.diff().tolist() == lengths
    assert batch.tokens.shape == (1, sum(lengths))
    starts = batch.tokens[0][batch.bounds[:-1]].tolist()
    assert sorted(starts) == sorted(sample.prompt[0] for sample in chosen)


@pytest.mark.parametrize("packed", [False, True])
def test_what_an_environment_wrote_has_no_loss(packed: bool):
    """Only states that predict the policy's tokens get a gradient, and none gets two."""
    chosen = [
        PolicySample(
            prompt=(1, 2),
            completion=(3, 4, 50, 51, 5, 6, 52, 7),
            logprobs=(-0.1, -0.2, -0.3, -0.4, -0.5),
            temperature=1.0,
            advantage=2.0,
            turns=((0, 2), (4, 6), (7, 8)),
        ),
        PolicySample(
            prompt=(1,), completion=(8, 9), logprobs=(-0.6, -0.7), temperature=1.0, advantage=1.0
        ),
    ]
    (batch,) = build_micro_batches(chosen, 1000, CPU, packed)
    assert batch.targets.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert batch.tokens.flatten()[batch.positions].tolist() == [2, 3, 51, 5, 52, 1, 8]
    assert batch.length.tolist() == [5] * 5 + [2] * 2
    assert batch.owner.tolist() == [0] * 5 + [1] * 2
    states = torch.randn(batch.tokens.numel(), 60, requires_grad=True)
    logprobs = states[batch.positions].log_softmax(-1).gather(1, batch.targets[:, None])
    (logprobs[:, 0] * batch.advantage / batch.length).sum().backward()
    assert states.grad is not None
    learned = states.grad.abs().sum(-1).nonzero().flatten().tolist()
    assert learned == sorted(batch.positions.tolist())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prompt": ()}, "at least one prompt token"),
        ({"completion": (), "logprobs": ()}, "at least one prompt token"),
        ({"logprobs": (-1.0,)}, "one log-prob for each"),
        ({"temperature": 0.0}, "greedy"),
        ({"turns": ()}, "at least one prompt token"),
        ({"turns": ((0, 1),)}, "one log-prob for each"),
    ],
)
def test_refuses_a_sample_without_log_probs(changes: dict[str, object], complaint: str):
    sound: dict[str, object] = {
        "prompt": (1,),
        "completion": (2, 3),
        "logprobs": (-1.0, -1.0),
        "temperature": 1.0,
        "advantage": 1.0,
    }
    with pytest.raises(ValueError, match=complaint):
        PolicySample(**(sound | changes))  # pyright: ignore[reportArgumentType]
