"""Wall-clock stretches count with the share of the time in which the thread computes."""

import pytest

from tlt.engine.native.speculation_controller import ProcessorShare


def test_half_a_core_is_a_share_of_one_half() -> None:
    share = ProcessorShare()
    assert [share.update(work=0.001, wall=0.002) for _ in range(10)] == pytest.approx([0.5] * 10)


def test_an_idle_machine_leaves_stretches_as_they_are() -> None:
    assert ProcessorShare().update(work=0.0021, wall=0.002) == 1.0


def test_forgets_what_the_machine_did_long_ago() -> None:
    share = ProcessorShare()
    for _ in range(1000):
        share.update(work=0.01, wall=0.05)
    found = [share.update(work=0.05, wall=0.05) for _ in range(4000)]
    assert found[-1] > 0.97
