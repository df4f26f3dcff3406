"""A micro-batch that any check interrupts changes nothing."""

from collections.abc import Callable

import pytest
import torch

from tests.interrupts import interrupting_checks
from tests.trainer.drafters import LAYOUTS, VOCABULARY, learner, samples, whole
from tests.trainer.models import CPU, copies
from tlt.base.interrupt_check import Interrupted
from tlt.trainer.drafter import interruptible_matmul
from tlt.trainer.drafter.drafter_learner import DrafterLearner
from tlt.trainer.drafter.interruptible_matmul import matmul
from tlt.trainer.drafter.micro_batches import DrafterBatch, Window, build_batch
from tlt.trainer.policy.model import logprobs

STEPS = 3


@pytest.fixture(autouse=True)
def _everything_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 2 * VOCABULARY * 7)
    monkeypatch.setattr(interruptible_matmul, "CPU_WORK", 2000)


def window() -> DrafterBatch:
    """Build a window of a sample with rows before it."""
    sample = max(samples("eagle3", 9, dtype=torch.float32), key=lambda sample: sample.rows)
    return build_batch([sample], [Window(sample=0, first=9, last=sample.rows)], STEPS, CPU)


def several(layout: str) -> DrafterBatch:
    return whole(samples(layout, 2, dtype=torch.float32), STEPS)


CASES: dict[str, Callable[[], tuple[DrafterLearner, DrafterBatch]]] = {
    **{
        layout: lambda layout=layout: (learner(layout, torch.float32), several(layout))
        for layout in LAYOUTS
    },
    "own head": lambda: (learner("eagle3", torch.float32, own_head=12), several("eagle3")),
    "window": lambda: (learner("eagle3", torch.float32), window()),
}


@pytest.mark.parametrize("case", CASES)
def test_interrupted_micro_batch_leaves_no_trace(case: str):
    steady, batch = CASES[case]()
    steady.learn(batch)
    interrupted, _ = CASES[case]()
    interrupted.learn(batch)
    before = copies(steady.state())
    expected = steady.learn(batch)
    interruptions = 0
    # one case covers all shapes
    stride = 2 if case == "eagle" else 11
    for check in interrupting_checks(stride):
        try:
            found = interrupted.learn(batch, check)
            break
        except Interrupted:
            interruptions += 1
        for name, tensor in interrupted.state().items():
            assert torch.equal(tensor, before[name]), (interruptions, name)
    # in the forward pass, in the backward pass and in the step
    assert interruptions * stride > 100
    assert found == expected
    after = interrupted.state()
    for name, tensor in steady.state().items():
        assert torch.equal(tensor, after[name]), name


def test_does_not_check_after_a_micro_batch():
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1

    learns, batch = CASES["eagle"]()
    learns.learn(batch, check)
    once = checks
    learns.learn(batch)
    learns.drafter()
    assert checks == once


def test_matmul_in_parts_is_the_product():
    left, right = torch.randn(2, 30, 30, generator=torch.Generator().manual_seed(0))
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1

    torch.testing.assert_close(matmul(left, right.T, check), left @ right.T)
    assert checks == 15
