"""The number of rows of a micro-batch adapts until it takes 20 to 60 ms."""

import pytest

from tlt.base.interrupt_check import Interrupted
from tlt.ranks.drafter.micro_batch_time_limit import MicroBatchSize

# updates after which micro-batches no longer grow
TRAINED = 400


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def interrupt_after(seconds: float, size: MicroBatchSize, clock: _Clock) -> None:
    with size.adapt(TRAINED):
        clock.now += seconds
        raise Interrupted


def test_shrinks_after_a_micro_batch_that_was_too_long_to_be_finished() -> None:
    clock = _Clock()
    size, rows = MicroBatchSize(clock), list[int]()
    for seconds in (0.01, 0.12, 5.0):
        rows.append(size.rows)
        with pytest.raises(Interrupted):
            interrupt_after(seconds, size, clock)
    assert rows == [256, 256, 128]
    assert size.rows == 32


def test_moves_half_of_the_way_after_each_micro_batch() -> None:
    clock = _Clock()
    size = MicroBatchSize(clock)
    for seconds, rows in ((0.03, 384), (0.06, 384), (0.12, 288)):
        with size.adapt(TRAINED):
            clock.now += seconds
        assert size.rows == rows


def test_grows_with_the_updates_of_the_drafter() -> None:
    clock = _Clock()
    size, rows = MicroBatchSize(clock), list[int]()
    for updates in (0, 200, 400, 4000):
        for _ in range(40):
            with size.adapt(updates):
                clock.now += size.rows * 1e-4
        rows.append(size.rows)
    assert rows == pytest.approx([200, 400, 600, 600], abs=3)
