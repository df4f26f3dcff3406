"""A job loses and doubles nothing under faults that no other test of a live session injects."""

from pathlib import Path
from random import Random

import pytest

from tests.chaos.plan import FAULTS, draw
from tests.chaos.results import Results
from tests.chaos.runner import CHANGES, Runner
from tests.chaos.session import session

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
_FAULTS = (
    "double events",
    "double prompts",
    "hold back events",
    "lose deliveries to the coordinator",
    "let Redis run out of memory",
    "set the clock back",
    "fill the shared memory",
)


def test_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    with session(tmp_path) as own:
        results = Results()
        runner = Runner(
            Random(1), results, (*CHANGES, "algorithm.steps=3", "loggers=[]"), ahead=False
        )
        runner.use(own)
        runner.run_job(_FAULTS)
    # a fault of messages is skipped where the job has none at that moment
    assert len(results.injected) + len(results.skipped) == len(_FAULTS)
    assert len(results.injected) >= len(_FAULTS) // 2
    for job in results.jobs:
        assert job.status == "done"
        assert (job.findings.lost, job.findings.doubled) == (0, 0), job.findings.notes
        assert job.findings.answers > job.findings.samples > 0


def test_each_kind_is_drawn_three_times_and_the_same_seed_draws_the_same() -> None:
    jobs = draw(200, 20, Random(7))
    drawn = [fault for faults in jobs for fault in faults]
    assert len(drawn) == 200
    assert len(jobs) == 20
    assert min(map(drawn.count, FAULTS)) >= 3
    assert jobs == draw(200, 20, Random(7))
    ends = [faults for faults in jobs if "flip a byte of the committed journal" in faults]
    assert [faults[-1] for faults in ends] == ["flip a byte of the committed journal"] * 3
