"""A session goes on after the death of Ray's head, says so, and leaves nothing behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live import (
    Live,
    count_dropped,
    counted_rollouts,
    kill,
    processes_of,
    wait_until,
)
from tlt.base.end_session_processes import is_running
from tlt.runs.run_folder_reader import open_ledger
from tlt.session.fault_log import Supervised, read_supervised
from tlt.session.session_files import blobs_in_flight, is_up, short_folder

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
DRIVER, RAYLET, GCS = "Ray's driver", "Ray's raylet", "Ray's GCS"
ROLLOUTS = 2 * 4 * 8


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Live]:
    """Start a session that the test may harm; it leaves nothing once it is down."""
    session = Live(tmp_path)
    up(session)
    yield session
    if is_up(folder_of(session)):
        session.tlt("down")
    assert processes_of(session) == []
    short = short_folder(folder_of(session))
    assert [place for place in (short, blobs_in_flight(short)) if place.exists()] == []


def up(session: Live) -> None:
    session.tlt("up", "--workers", "1", "--runs", str(session.runs))


def folder_of(session: Live) -> Path:
    return session.home / "tlt" / "sessions" / "default"


def supervised(session: Live) -> Supervised:
    return read_supervised(folder_of(session))


def await_healed(session: Live, faults: int) -> None:
    wait_until(
        lambda: [f.healed_at is not None for f in supervised(session).faults] == [True] * faults,
        f"{faults} faults to be healed",
    )


def rewards(session: Live, job: str) -> list[float]:
    """Return the reward of each step of a job that has lost and doubled nothing."""
    assert session.await_end(job)["status"] == "done", session.job(job)["error"]
    journal = session.journal(job)
    counted = counted_rollouts(journal, open_ledger(session.runs / job))
    assert len(counted) == len(set(counted)) == ROLLOUTS
    assert count_dropped(journal) == 0
    return [step.reward for step in session.fold(job).steps]


def assert_rollout_survives(session: Live, job: str, part: str, step: int) -> None:
    """Kill a part of Ray in the rollout of a step, and wait until everything is back."""
    session.await_phase(job, "rollout", step)
    worker = session.workers()["w0"]
    kill(supervised(session).processes[part].pid)
    wait_until(lambda: len(supervised(session).faults) > step, f"{part} to be missed")
    shown = session.tlt("status").stdout
    assert f"{part} ended " in shown
    assert "; starting again" in shown
    assert f"{part} ended " in session.tlt("top", job, "--once").stdout
    await_healed(session, step + 1)
    assert "all worked again" in session.tlt("status").stdout
    # a process that ended would be a zombie at most
    old = {worker.pid, *worker.rank_pids}
    assert not old & {int(p.name) for p in Path("/proc").iterdir() if _has_command(p)}


def _has_command(process: Path) -> bool:
    try:
        return process.name.isdigit() and bool((process / "cmdline").read_bytes())
    except OSError:
        return False


def test_a_job_goes_on_after_raylet_and_gcs_died(own: Live, long_spec: Path) -> None:
    undisturbed = rewards(own, own.submit(long_spec))
    job = own.submit(long_spec)
    assert_rollout_survives(own, job, RAYLET, step=0)
    assert_rollout_survives(own, job, GCS, step=1)
    assert rewards(own, job) == undisturbed
    processes = own.json("status")["processes"]
    assert {process["state"] for process in processes} == {"up"}
    assert {process["name"] for process in processes} >= {RAYLET, GCS, "coordinator", "w0"}


def test_an_update_is_repeated_after_all_of_ray_died(own: Live, slow_update_spec: Path) -> None:
    undisturbed = rewards(own, own.submit(slow_update_spec))
    job = own.submit(slow_update_spec)
    own.await_phase(job, "policy_update", step=1)
    processes = supervised(own).processes
    for part in (DRIVER, RAYLET, GCS):
        kill(processes[part].pid)
    assert rewards(own, job) == undisturbed
    await_healed(own, 1)


def test_a_session_resumes_after_all_its_processes_died(own: Live, long_spec: Path) -> None:
    undisturbed = rewards(own, own.submit(long_spec))
    job = own.submit(long_spec)
    own.await_phase(job, "rollout", step=1)
    beats = own.workers()["w0"]
    parts = [*supervised(own).processes.values()]
    for pid in (*(part.pid for part in parts), beats.pid, *beats.rank_pids):
        kill(pid)
    wait_until(lambda: not any(map(is_running, parts)), "the processes to end")
    assert "no session" in own.tlt("status", code=3).stderr
    up(own)
    assert rewards(own, job) == undisturbed


def test_down_removes_what_a_dead_session_has_left(own: Live) -> None:
    kill(supervised(own).processes["supervisor"].pid)
    wait_until(lambda: not is_up(folder_of(own)), "the lock to be free")
    assert "is down already" in own.tlt("down").stdout
    assert own.tlt("down", code=3).stderr
