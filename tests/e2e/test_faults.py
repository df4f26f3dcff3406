"""A job survives the death of any process, and no answer is lost or counted twice."""

import signal
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

pytestmark = pytest.mark.timeout(300)
ROLLOUTS_A_STEP = 4 * 8


def assert_nothing_lost_or_doubled(live: Live, job: str) -> None:
    assert live.await_end(job)["status"] == "done", live.job(job)["error"]
    snapshot, journal = live.fold(job), live.journal(job)
    assert snapshot.version == 2
    counted = counted_rollouts(journal, open_ledger(live.runs / job))
    assert len(counted) == len(set(counted)) == 2 * ROLLOUTS_A_STEP
    assert count_dropped(journal) == 0
    assert [step.rollouts for step in snapshot.steps] == [ROLLOUTS_A_STEP] * 2


@pytest.fixture(autouse=True)
def _all_workers_up(live: Live) -> None:
    live.await_workers(2)


def _rank_pid(live: Live) -> int:
    return live.workers()["w1"].rank_pids[1]


def test_survives_a_rank_that_dies_while_decoding(live: Live, long_spec: Path) -> None:
    rank = _rank_pid(live)
    job = live.submit(long_spec)
    live.await_phase(job, "rollout")
    kill(rank)
    assert_nothing_lost_or_doubled(live, job)
    assert live.fold(job).losses == 1


# with shards each micro-batch takes longer
@pytest.mark.parametrize(
    "changes", [(), ("algorithm.shards=all", "algorithm.microbatch_tokens=500")]
)
def test_survives_a_rank_that_dies_in_an_update(
    live: Live, slow_update_spec: Path, changes: tuple[str, ...]
) -> None:
    """The collective fails on all ranks, and fresh ones repeat the update from the checkpoint."""
    job = live.submit(slow_update_spec, "algorithm.checkpoint_every=1", *changes)
    live.await_phase(job, "policy_update", step=1)
    kill(_rank_pid(live))
    assert_nothing_lost_or_doubled(live, job)
    assert live.fold(job).losses >= 1


def test_repeats_updates_since_the_last_checkpoint(live: Live, slow_update_spec: Path) -> None:
    rank = _rank_pid(live)
    job = live.submit(slow_update_spec, "algorithm.checkpoint_every=2")
    live.await_phase(job, "policy_update", step=1)
    kill(rank)
    assert_nothing_lost_or_doubled(live, job)
    assert live.fold(job).losses >= 1


def test_replaces_a_rank_that_dies_without_a_job(live: Live, spec: Path) -> None:
    before = live.workers()["w1"].incarnation
    kill(_rank_pid(live))
    wait_until(lambda: live.workers()["w1"].incarnation > before, "a new incarnation")
    live.await_workers(2)
    assert live.await_end(live.submit(spec))["status"] == "done"


def test_survives_a_rank_that_stands_still(live: Live, long_spec: Path) -> None:
    job = live.submit(long_spec, "workers.stuck_seconds=6")
    live.await_phase(job, "rollout")
    kill(_rank_pid(live), signal.SIGSTOP)
    assert_nothing_lost_or_doubled(live, job)


def test_survives_the_death_of_a_worker_process(live: Live, long_spec: Path) -> None:
    job = live.submit(long_spec)
    live.await_phase(job, "rollout")
    before = live.workers()["w0"].pid
    kill(before)
    wait_until(lambda: live.workers()["w0"].pid != before, "Ray to start w0 again")
    assert_nothing_lost_or_doubled(live, job)


def test_refuses_a_worker_that_slept_through_its_lease(live: Live, long_spec: Path) -> None:
    # read before the job starts, because on a busy machine the job could end before the reply
    sleeper = live.workers()["w0"]
    job = live.submit(long_spec)
    live.await_phase(job, "rollout")
    kill(sleeper.pid, signal.SIGSTOP)
    try:
        wait_until(
            lambda: any(
                "no heartbeat" in line for line in live.tlt("logs", job).stdout.split("\n")
            ),
            "the lease to end",
        )
    finally:
        kill(sleeper.pid, signal.SIGCONT)
    assert_nothing_lost_or_doubled(live, job)
    wait_until(lambda: live.workers()["w0"].incarnation > sleeper.incarnation, "w0 to come back")


@pytest.mark.parametrize("service", ["coordinator", "reward"])
def test_survives_the_death_of_a_service(live: Live, long_spec: Path, service: str) -> None:
    job = live.submit(long_spec, "loggers=[tensorboard]")
    live.await_phase(job, "rollout")
    kill(pid_of(live, service))
    assert_nothing_lost_or_doubled(live, job)
    run = live.runs / job
    wait_until(lambda: ("run/seconds", 1) in points(run), "the last report")
    assert set(points(run).values()) == {1}


def test_survives_the_death_of_redis(live: Live, long_spec: Path) -> None:
    job = live.submit(long_spec)
    live.await_phase(job, "rollout")
    kill(redis_pid(live))
    assert_nothing_lost_or_doubled(live, job)
