import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.learn.models import CPU, samples
from tlt.learn.batching import microbatches
from tlt.learn.sample import LearnSample


@settings(max_examples=40, deadline=None)
@given(count=st.integers(0, 30), budget=st.integers(1, 300), seed=st.integers(0, 99))
def test_every_completion_token_is_scored_once_within_the_budget(
    count: int, budget: int, seed: int
):
    chosen = samples(count, seed)
    batches = microbatches(chosen, budget, CPU)
    assert sum(batch.samples for batch in batches) == count
    for batch in batches:
        rows, width = batch.tokens.shape
        assert rows == 1 or rows * width <= budget
    scored = sorted(token for batch in batches for token in batch.targets.tolist())
    assert scored == sorted(token for sample in chosen for token in sample.completion)


def test_a_position_is_the_one_before_its_target():
    for batch in microbatches(samples(12), 1, CPU):
        known = batch.tokens.flatten()[batch.positions[1:]]
        torch.testing.assert_close(known, batch.targets[:-1])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prompt": ()}, "at least one prompt token"),
        ({"completion": (), "logprobs": ()}, "at least one prompt token"),
        ({"logprobs": (-1.0,)}, "one log-prob for each"),
        ({"temperature": 0.0}, "greedy"),
    ],
)
def test_a_sample_that_cannot_be_learned_from_is_refused(
    changes: dict[str, object], complaint: str
):
    sound: dict[str, object] = {
        "prompt": (1,),
        "completion": (2, 3),
        "logprobs": (-1.0, -1.0),
        "temperature": 1.0,
        "advantage": 1.0,
    }
    with pytest.raises(ValueError, match=complaint):
        LearnSample(**(sound | changes))  # pyright: ignore[reportArgumentType]
