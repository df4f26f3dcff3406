"""A session that ends during a job resumes the job when it is up again."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live import Live, kill, processes_of, wait_until, write_spec
from tlt.session.session_files import blobs_in_flight, is_up, short_folder

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]
STEPS = 4


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Live]:
    """Start a session that the test may end."""
    session = Live(tmp_path)
    _up(session, workers=2)
    yield session
    if is_up(_folder(session)):
        session.tlt("down")
    assert processes_of(session) == []
    short = short_folder(_folder(session))
    assert [place for place in (short, blobs_in_flight(short)) if place.exists()] == []


def _up(session: Live, workers: int) -> None:
    session.tlt("up", "--workers", str(workers), "--runs", str(session.runs))


def _folder(session: Live) -> Path:
    return session.home / "tlt" / "sessions" / "default"


def _long_job(session: Live, raw: dict[str, Any]) -> str:
    algorithm = {**raw["algorithm"], "steps": STEPS, "checkpoint_every": 2, "eval_every": 2}
    spec = {**raw, "algorithm": algorithm, "rollout": {"max_new_tokens": 200, "slots": 4}}
    job = session.submit(write_spec(session.home, spec))
    # after a checkpoint and one more update that no checkpoint holds
    session.await_phase(job, "rollout", step=3)
    return job


def _assert_resumes(session: Live, job: str) -> None:
    """Resume with fewer workers than before."""
    _up(session, workers=1)
    assert session.await_end(job)["status"] == "done", session.job(job)["error"]
    snapshot = session.fold(job)
    assert snapshot.version == STEPS
    assert [step.rollouts for step in snapshot.steps] == [32] * STEPS
    assert snapshot.losses == 0


def test_resumes_a_job_after_the_session_was_ended(own: Live, raw_spec: dict[str, Any]) -> None:
    job = _long_job(own, raw_spec)
    own.tlt("down")
    assert processes_of(own) == []
    short = short_folder(_folder(own))
    assert [place for place in (short, blobs_in_flight(short)) if place.exists()] == []
    _assert_resumes(own, job)


def test_resumes_a_job_after_its_supervisor_was_killed(own: Live, raw_spec: dict[str, Any]) -> None:
    job = _long_job(own, raw_spec)
    supervisor = json.loads((_folder(own) / "ready.json").read_text())["pid"]
    kill(supervisor, signal.SIGKILL)
    # Ray's own helper processes may take a minute to notice
    wait_until(
        lambda: not [p for p in processes_of(own) if "tlt." in p or "redis" in p],
        "ranks and Redis to end with their supervisor",
    )
    _assert_resumes(own, job)
