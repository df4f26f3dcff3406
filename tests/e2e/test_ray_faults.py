"""A job goes on after the death of Ray and of its session, which says so and leaves nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live import (
    Live,
    count_dropped,
    counted_rollouts,
    kill,
    processes_of,
    wait_until,
    write_spec,
)
from tlt.base.end_session_processes import is_running
from tlt.runs.run_folder_reader import open_ledger
from tlt.session.fault_log import Supervised, read_supervised
from tlt.session.session_files import blobs_in_flight, is_up, short_folder

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
DRIVER, RAYLET, GCS = "Ray's driver", "Ray's raylet", "Ray's GCS"
STEPS, ANSWERS_A_STEP = 4, 4 * 8


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Start a session that the tests may harm; it leaves nothing once it is down."""
    session = Live(tmp_path_factory.mktemp("harmed"))
    up(session)
    yield session
    if is_up(folder_of(session)):
        session.tlt("down")
    assert_nothing_left(session)


@pytest.fixture
def own(session: Live) -> Live:
    """Return the session, which an earlier test may have ended."""
    if not is_up(folder_of(session)):
        up(session)
    return session


@pytest.fixture(scope="module")
def spec(home: Path, raw_spec: dict[str, Any]) -> Path:
    """Return a job whose rollouts and updates take seconds, so that a fault can hit each."""
    long = {
        **raw_spec,
        "rollout": {"max_new_tokens": 240, "slots": 4},
        "algorithm": {
            **raw_spec["algorithm"],
            "steps": STEPS,
            "eval_every": 0,
            "minibatches": 4,
            # one answer in each
            "microbatch_tokens": 1,
        },
    }
    return write_spec(home, long, "harmed.yaml")


@pytest.fixture(scope="module")
def undisturbed(session: Live, spec: Path) -> list[float]:
    """Return the rewards of a job that nothing hits."""
    if not is_up(folder_of(session)):
        up(session)
    return rewards(session, session.submit(spec))


def up(session: Live) -> None:
    session.tlt("up", "--workers", "1", "--runs", str(session.runs))


def assert_nothing_left(session: Live) -> None:
    assert processes_of(session) == []
    short = short_folder(folder_of(session))
    assert [place for place in (short, blobs_in_flight(short)) if place.exists()] == []


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
    steps = session.fold(job).steps
    assert len(counted) == len(set(counted)) == ANSWERS_A_STEP * len(steps)
    assert count_dropped(journal) == 0
    return [step.reward for step in steps]


def assert_survives(session: Live, job: str, *parts: str) -> None:
    """Kill parts of Ray, and wait until everything is back."""
    faults = len(supervised(session).faults)
    worker = session.workers()["w0"]
    for part in parts:
        kill(supervised(session).processes[part].pid)
    wait_until(lambda: len(supervised(session).faults) > faults, f"{parts} to be missed")
    shown, top = (session.tlt(*each).stdout for each in (("status",), ("top", job, "--once")))
    assert "; starting again" in shown
    assert any(f"{part} ended " in shown and f"{part} ended " in top for part in parts)
    await_healed(session, faults + 1)
    assert "all worked again" in session.tlt("status").stdout
    # a process that ended would be a zombie at most
    old = {worker.pid, *worker.rank_pids}
    assert not old & {int(p.name) for p in Path("/proc").iterdir() if _has_command(p)}


def _has_command(process: Path) -> bool:
    try:
        return process.name.isdigit() and bool((process / "cmdline").read_bytes())
    except OSError:
        return False


def test_a_job_goes_on_after_parts_of_ray_died(
    own: Live, spec: Path, undisturbed: list[float]
) -> None:
    """One dies in a rollout, all die in an update, and another one in the next rollout."""
    job = own.submit(spec, "algorithm.steps=2")
    own.await_phase(job, "rollout")
    assert_survives(own, job, RAYLET)
    own.await_phase(job, "policy_update")
    assert_survives(own, job, DRIVER, RAYLET, GCS)
    own.await_phase(job, "rollout", step=1)
    assert_survives(own, job, GCS)
    assert rewards(own, job) == undisturbed[:2]
    processes = own.json("status")["processes"]
    assert {process["state"] for process in processes} == {"up"}
    assert {process["name"] for process in processes} >= {RAYLET, GCS, "coordinator", "w0"}


def test_a_job_goes_on_after_its_session_was_ended_and_after_it_died(
    own: Live, spec: Path, undisturbed: list[float]
) -> None:
    job = own.submit(spec)
    own.await_phase(job, "rollout", step=1)
    own.tlt("down")
    assert_nothing_left(own)
    up(own)
    # after a checkpoint and one more update that no checkpoint holds
    own.await_phase(job, "rollout", step=3)
    beats = own.workers()["w0"]
    parts = [*supervised(own).processes.values()]
    for pid in (*(part.pid for part in parts), beats.pid, *beats.rank_pids):
        kill(pid)
    wait_until(lambda: not any(map(is_running, parts)), "the processes to end")
    assert "no session" in own.tlt("status", code=3).stderr
    up(own)
    assert rewards(own, job) == undisturbed

    kill(supervised(own).processes["supervisor"].pid)
    wait_until(lambda: not is_up(folder_of(own)), "the lock to be free")
    assert "is down already" in own.tlt("down").stdout
    assert own.tlt("down", code=3).stderr
    assert_nothing_left(own)
