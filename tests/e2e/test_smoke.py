"""Real parts together: a job on real ranks survives the death of each part.

What `tests/local_session` shows one by one with ranks that don't compute.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.live import (
    Live,
    count_dropped,
    counted_rollouts,
    kill,
    pid_of,
    redis_pid,
    wait_until,
)
from tests.tensorboard_files import points
from tlt.runs.run_folder_reader import open_ledger
from tlt.session.job_submission import submit_job
from tlt.spec.spec_files import load_job_spec

pytestmark = pytest.mark.timeout(600)
STEPS, ANSWERS_A_STEP = 8, 6 * 4
CHANGES = (
    f"algorithm.steps={STEPS}",
    "algorithm.prompts_per_step=6",
    "algorithm.group_size=4",
    # one worker has slots for all answers, so the other one idles and trains
    "rollout.slots=24",
    "rollout.spread=false",
    "speculation.mode=adaptive",
    "speculation.depths=[2]",
    "drafter.train=always",
    "drafter.merge_every=1",
    "loggers=[tensorboard]",
)


def test_a_job_survives_the_death_of_each_part(
    live: Live, long_spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank, the coordinator, Redis and a worker's process are killed in turn, one a step."""
    monkeypatch.setenv("TLT_HOME", live.environment["TLT_HOME"])
    live.await_workers(2)
    job = submit_job("default", load_job_spec(long_spec, list(CHANGES))).job
    before = live.workers()["w1"].pid
    faults: list[Callable[[], int]] = [
        lambda: decoding_rank(live),
        lambda: pid_of(live, "coordinator"),
        lambda: redis_pid(live),
        lambda: live.workers()["w1"].pid,
    ]
    for step, victim in enumerate(faults, 1):
        live.await_phase(job, "rollout", step)
        kill(victim())
    wait_until(lambda: live.workers()["w1"].pid != before, "Ray to start w1 again")
    assert live.await_end(job, 200.0)["status"] == "done", live.job(job)["error"]

    snapshot, journal = live.fold(job), live.journal(job)
    assert snapshot.version == STEPS
    assert [step.rollouts for step in snapshot.steps] == [ANSWERS_A_STEP] * STEPS
    counted = counted_rollouts(journal, open_ledger(live.runs / job))
    assert len(counted) == len(set(counted)) == STEPS * ANSWERS_A_STEP
    assert count_dropped(journal) == 0
    assert snapshot.losses >= 2
    run = live.runs / job
    wait_until(lambda: ("run/seconds", STEPS - 1) in points(run), "the last report")
    assert set(points(run).values()) == {1}


def decoding_rank(live: Live) -> int:
    """Return the first rank of a worker that decodes."""
    found: list[int] = []

    def decodes() -> bool:
        busy = [beat for beat in live.workers().values() if beat.running and beat.rank_pids]
        found[:] = [beat.rank_pids[0] for beat in busy]
        return bool(found)

    wait_until(decodes, "a worker to decode")
    return found[0]
