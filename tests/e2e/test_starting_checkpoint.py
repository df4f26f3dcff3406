"""A job that starts from another's checkpoint goes on as if nothing had disturbed the other."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live import Live, kill, write_spec
from tlt.protocol.commands import StartJob
from tlt.report import StepSummary

pytestmark = pytest.mark.timeout(300)
STEPS = 6
_ENDLESS = "algorithm.steps=1000"


@pytest.fixture(scope="module")
def goes_on_spec(live: Live, raw_spec: dict[str, Any]) -> Path:
    """Return a job that saves a checkpoint every two steps, and whose learning rate rises."""
    algorithm = {
        **raw_spec["algorithm"],
        "steps": STEPS,
        "warmup_steps": STEPS,
        "eval_every": 0,
        # what `auto` measures may differ from job to job
        "precision": "float32",
        "attention": "padded",
        "compile": False,
    }
    rollout = {"max_new_tokens": 100, "slots": 4}
    spec = {**raw_spec, "name": "goes-on", "algorithm": algorithm, "rollout": rollout}
    return write_spec(live.home, spec, "goes-on.yaml")


@pytest.fixture(scope="module")
def undisturbed_job(live: Live, goes_on_spec: Path) -> str:
    job = live.submit(goes_on_spec)
    assert live.await_end(job)["status"] == "done", live.job(job)["error"]
    return job


@pytest.fixture(scope="module")
def undisturbed(live: Live, undisturbed_job: str) -> Sequence[StepSummary]:
    return live.fold(undisturbed_job).steps


def assert_went_on(
    live: Live, job: str, start: str, step: int, undisturbed: Sequence[StepSummary]
) -> None:
    """Assert that the steps from `step` on are those of the undisturbed job."""
    assert live.job(job)["from"] == start
    began = live.journal(job)[0].event
    assert isinstance(began, StartJob)
    assert began.starts_from is not None
    assert began.starts_from.name == live.fold(job).starts_from == start
    steps = live.fold(job).steps[: STEPS - step]
    assert [each.step for each in steps] == list(range(step, STEPS))
    for ours, theirs in zip(steps, undisturbed[step:], strict=True):
        assert ours.reward == theirs.reward
        assert ours.metrics is not None
        assert theirs.metrics is not None
        assert ours.metrics.learning_rate == theirs.metrics.learning_rate
        assert ours.metrics.gradient_norm == pytest.approx(theirs.metrics.gradient_norm, rel=1e-3)


def test_a_retry_goes_on_where_a_job_was_cancelled(
    live: Live, goes_on_spec: Path, undisturbed: Sequence[StepSummary]
) -> None:
    # one answer at a time, so that the job isn't far ahead when it is cancelled
    job = live.submit(goes_on_spec, _ENDLESS, "rollout.slots=1")
    live.await_phase(job, "rollout", step=2)
    live.tlt("cancel", job)
    saved = live.fold(job).last
    assert saved is not None
    again = str(live.json("retry", job)["job"])
    live.await_phase(again, "rollout", step=STEPS)
    assert "neither failed nor cancelled" in live.tlt("retry", again, code=2).stderr
    live.tlt("cancel", again)
    assert saved.version < STEPS
    assert_went_on(live, again, f"{job}@{saved.version}", saved.version, undisturbed)


def test_a_retry_of_a_job_that_never_ran_starts_where_it_would_have(
    live: Live, goes_on_spec: Path, undisturbed_job: str
) -> None:
    running = live.submit(goes_on_spec, _ENDLESS)
    start = f"{undisturbed_job}@{STEPS}"
    queued = live.submit(goes_on_spec, _ENDLESS, start=start)
    live.tlt("cancel", queued)
    again = live.json("retry", queued)
    assert again["from"] == live.job(str(again["job"]))["from"] == start
    for job in (str(again["job"]), running):
        live.tlt("cancel", job)


def test_a_job_goes_on_from_one_that_lost_its_worker(
    live: Live, goes_on_spec: Path, undisturbed: Sequence[StepSummary]
) -> None:
    live.await_workers(2)
    changes = ("workers.max_restarts=0", "algorithm.keep_all=true", _ENDLESS)
    job = live.submit(goes_on_spec, *changes)
    live.await_phase(job, "policy_update", step=4)
    kill(live.workers()["w1"].rank_pids[1])
    assert live.await_end(job)["status"] == "failed"
    live.await_workers(2)
    again = live.submit(goes_on_spec, start=f"{job}@2")
    assert live.await_end(again)["status"] == "done", live.job(again)["error"]
    assert_went_on(live, again, f"{job}@2", 2, undisturbed)


def test_a_finished_job_gets_more_steps_with_and_without_shards(
    live: Live, goes_on_spec: Path, undisturbed: Sequence[StepSummary]
) -> None:
    """Shards go on from whole copies, and whole copies from shards."""
    whole = live.submit(goes_on_spec, "algorithm.steps=2")
    assert live.await_end(whole)["status"] == "done", live.job(whole)["error"]
    split = live.submit(goes_on_spec, "algorithm.steps=4", "algorithm.shards=all", start=whole)
    assert live.await_end(split)["status"] == "done", live.job(split)["error"]
    last = live.submit(goes_on_spec, start=split)
    assert live.await_end(last)["status"] == "done", live.job(last)["error"]
    assert live.job(last)["from"] == f"{split}@4"
    steps = [step for job in (whole, split, last) for step in live.fold(job).steps]
    for ours, theirs in zip(steps, undisturbed, strict=True):
        assert ours.metrics is not None
        assert theirs.metrics is not None
        assert ours.metrics.gradient_norm == pytest.approx(theirs.metrics.gradient_norm, rel=1e-3)


def test_finds_a_job_of_an_earlier_session_by_its_name(
    live: Live, goes_on_spec: Path, undisturbed_job: str
) -> None:
    shutil.copytree(live.runs / undisturbed_job, live.runs / "earlier-7")
    refused = live.tlt("submit", str(goes_on_spec), "--from", "earlier-7", code=2).stderr
    assert "earlier-7@6: 6 steps are done, and algorithm.steps is 6" in refused
    refused = live.tlt("submit", str(goes_on_spec), "--from", "earlier-8", code=2).stderr
    assert "there is no job 'earlier-8'" in refused
