"""A rollout depends on its key and on the weights, never on the rest of the batch."""

from pathlib import Path

import pytest
import torch

from tests.engine.conftest import MakeEngine
from tests.engine.reference import answers, gap_at_the_fork, new_request, random_prompts
from tlt.engine.base import Request, Sampling

pytestmark = pytest.mark.needs("token_identical")

SLOTS = (1, 4, 32)
TIE = 1e-4


def rollouts(count: int, tokens: int) -> list[Request]:
    prompts = random_prompts(count // 8, shortest=1, longest=12)
    return [new_request(i, prompts[i // 8], Sampling(), 2 + i % (tokens - 1)) for i in range(count)]


def test_rollouts_are_identical_in_float64(make_engine: MakeEngine, folder: Path) -> None:
    requests = rollouts(240, tokens=24)
    first, *others = [answers(make_engine(folder, slots=n), requests) for n in SLOTS]
    for other in others:
        assert all(other[r.id].tokens == first[r.id].tokens for r in requests)


def test_rollouts_differ_only_at_ties_in_float32(make_engine: MakeEngine, folder: Path) -> None:
    requests = rollouts(400, tokens=12)
    first, *others = [
        answers(make_engine(folder, slots=n, dtype=torch.float32), requests) for n in SLOTS
    ]
    for other in others:
        different = [r for r in requests if other[r.id].tokens != first[r.id].tokens]
        assert len(different) <= 1
        for r in different:
            assert gap_at_the_fork(folder, r, first[r.id].tokens, other[r.id].tokens) < TIE


def test_ties_are_rare(folder: Path) -> None:
    """Ties are too rare to hide a real difference."""
    gaps = [gap_at_the_fork(folder, r, [3], [4]) for r in rollouts(200, tokens=4)]
    assert torch.tensor(gaps).median() > 100 * TIE
