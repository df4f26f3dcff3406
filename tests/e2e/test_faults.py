"""Whatever dies in the middle of a job: it ends, nothing is lost, nothing counts twice."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.live import Live, dropped, kept, kill, wait_until
from tests.tensorboard_files import points
from tlt.run_folder import open_ledger

pytestmark = pytest.mark.timeout(300)
ROLLOUTS_A_STEP = 4 * 8


def assert_nothing_lost_or_doubled(live: Live, job: str) -> None:
    assert live.ended(job)["status"] == "done", live.job(job)["error"]
    snapshot, journal = live.fold(job), live.journal(job)
    assert snapshot.version == 2
    counted = kept(journal, open_ledger(live.runs / job))
    assert len(counted) == len(set(counted)) == 2 * ROLLOUTS_A_STEP
    assert dropped(journal) == 0
    assert [step.rollouts for step in snapshot.steps] == [ROLLOUTS_A_STEP] * 2


@pytest.fixture(autouse=True)
def _all_workers_up(live: Live) -> None:
    live.await_workers(2)


def _a_rank(live: Live) -> int:
    return live.workers()["w1"].rank_pids[1]


def test_a_rank_dies_while_it_decodes(live: Live, long_spec: Path) -> None:
    rank = _a_rank(live)
    job = live.submit(long_spec)
    live.await_phase(job, "rolling")
    kill(rank)
    assert_nothing_lost_or_doubled(live, job)
    assert live.fold(job).losses == 1


def test_a_rank_dies_in_an_update(live: Live, slow_update_spec: Path) -> None:
    """Everybody's collective fails; fresh ranks restore the checkpoint and do it again."""
    rank = _a_rank(live)
    job = live.submit(slow_update_spec, "algorithm.checkpoint_every=1")
    live.await_phase(job, "learning", step=1)
    kill(rank)
    assert_nothing_lost_or_doubled(live, job)
    assert live.fold(job).losses >= 1


def test_updates_since_the_last_checkpoint_are_made_again(
    live: Live, slow_update_spec: Path
) -> None:
    rank = _a_rank(live)
    job = live.submit(slow_update_spec, "algorithm.checkpoint_every=2")
    live.await_phase(job, "learning", step=1)
    kill(rank)
    assert_nothing_lost_or_doubled(live, job)
    assert live.fold(job).losses >= 1


def test_a_rank_dies_while_its_worker_has_nothing_to_do(live: Live, spec: Path) -> None:
    before = live.workers()["w1"].incarnation
    kill(_a_rank(live))
    wait_until(lambda: live.workers()["w1"].incarnation > before, "a new incarnation")
    live.await_workers(2)
    assert live.ended(live.submit(spec))["status"] == "done"


def test_a_rank_stands_still(live: Live, long_spec: Path) -> None:
    job = live.submit(long_spec, "workers.stuck_seconds=6")
    live.await_phase(job, "rolling")
    kill(_a_rank(live), signal.SIGSTOP)
    assert_nothing_lost_or_doubled(live, job)


def test_a_worker_process_dies(live: Live, long_spec: Path) -> None:
    job = live.submit(long_spec)
    live.await_phase(job, "rolling")
    before = live.workers()["w0"].pid
    kill(before)
    wait_until(lambda: live.workers()["w0"].pid != before, "Ray to start w0 again")
    assert_nothing_lost_or_doubled(live, job)


def test_a_worker_that_slept_through_its_lease_is_refused(live: Live, long_spec: Path) -> None:
    # asked for beforehand: on a busy machine the job could be over by the time of the answer
    sleeper = live.workers()["w0"]
    job = live.submit(long_spec)
    live.await_phase(job, "rolling")
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
def test_a_service_dies(live: Live, long_spec: Path, service: str) -> None:
    job = live.submit(long_spec, "loggers=[tensorboard]")
    live.await_phase(job, "rolling")
    kill(_pid_of(live, service))
    assert_nothing_lost_or_doubled(live, job)
    run = live.runs / job
    wait_until(lambda: ("run/seconds", 1) in points(run), "the last report")
    assert set(points(run).values()) == {1}


def test_redis_dies(live: Live, long_spec: Path) -> None:
    job = live.submit(long_spec)
    live.await_phase(job, "rolling")
    kill(_redis(live))
    assert_nothing_lost_or_doubled(live, job)


def _pid_of(live: Live, service: str) -> int:
    log = live.home / "tlt" / "sessions" / "default" / "logs" / f"{service}.jsonl"
    started = [json.loads(line) for line in log.read_text().splitlines() if '"started"' in line]
    return int(started[-1]["pid"])


def _redis(live: Live) -> int:
    """The child of the keeper that listens on the session's socket."""
    ready = json.loads((live.home / "tlt" / "sessions" / "default" / "ready.json").read_text())
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            status = (process / "status").read_text()
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if f"PPid:\t{ready['pid']}\n" in status and b"redis-server" in command.split(b"\0")[0]:
            return int(process.name)
    raise AssertionError(f"no redis-server below {ready['pid']}, {os.getpid()}")
