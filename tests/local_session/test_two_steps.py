"""Idle workers decode the next step's prompts, with weights that no timing decides."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.local_session.session import LocalSession, changed, write_spec
from tlt.base.id_types import JobId, WorkerId
from tlt.policies.run.run_state import Phase
from tlt.protocol.events import RolloutCut, RolloutFinished, WorkerLost
from tlt.report.duties import NEXT_STEP
from tlt.spec.config import JobSpec


@pytest.fixture
def two_steps(spec: JobSpec) -> JobSpec:
    return changed(spec, algorithm={"steps": 4, "checkpoint_every": 2, "staleness": 1})


@contextlib.asynccontextmanager
async def ahead(session: LocalSession, job: JobId, slow: str, step: int = 0) -> AsyncIterator[None]:
    """Hold a worker at its answers of a step, with the other one at those of the next."""
    with session.gates.hold(f"train-{step}-{slow}"):
        await session.arrived(f"train-{step}-{slow}")
        await session.until(lambda: _of_step(session, job, step + 1), "answer of the next step")
        yield


@contextlib.asynccontextmanager
async def begun(session: LocalSession, spec: JobSpec) -> AsyncIterator[JobId]:
    """Start a job whose first step waits for w0, while w1 decodes the second one."""
    await session.all_up()
    with session.gates.hold("train-0-w0"):
        job = await session.submit(spec)
        await session.arrived("train-0-w0")
        await session.until(lambda: _of_step(session, job, 1), "answer of the next step")
        yield job


def _of_step(session: LocalSession, job: JobId, step: int) -> list[RolloutFinished]:
    found = session.events(job, RolloutFinished)
    return [event for event in found if event.step == step and event.purpose == "train"]


def assert_versions(session: LocalSession, job: JobId) -> None:
    """Assert that all tokens of a step have the newest weights of when the step before began."""
    for event in session.events(job, RolloutFinished):
        spans = session.answers(job).read(event.answer).policies
        expected = event.step if event.purpose == "eval" else max(0, event.step - 1)
        assert {span.version for span in spans} == {expected}, event


async def test_answers_are_the_same_whenever_workers_idle(
    session: LocalSession, two_steps: JobSpec
) -> None:
    two_steps = changed(two_steps, algorithm={"eval_every": 1})
    expected = await session.undisturbed(two_steps)
    for slow in ("w0", "w1"):
        async with begun(session, two_steps) as job:
            pass
        async with ahead(session, job, slow, step=2):
            pass
        snapshot = await session.assert_unharmed(job, expected)
        assert_versions(session, job)
        assert {step.rollouts for step in snapshot.steps} == {16}
        assert [each.version for each in snapshot.evals] == [0, 1, 2, 3, 4]
        assert sum(duties.get(NEXT_STEP, 0.0) for duties in snapshot.workers.values()) > 0.0


@pytest.mark.parametrize("lost", ["w0", "w1"], ids=["the slow one", "the one that is ahead"])
async def test_a_worker_may_die_while_two_steps_are_decoded(
    session: LocalSession, two_steps: JobSpec, lost: str
) -> None:
    """The one that is left gives its answers of the next step back, and goes on with the first."""
    expected = await session.undisturbed(two_steps)
    async with begun(session, two_steps) as job:
        await session.kill_rank(lost, 1)
        await session.until(lambda: session.events(job, WorkerLost), "loss")
    await session.assert_unharmed(job, expected)
    assert_versions(session, job)


async def test_a_pause_keeps_both_steps(session: LocalSession, two_steps: JobSpec) -> None:
    expected = await session.undisturbed(two_steps)
    async with begun(session, two_steps) as job:
        pause = asyncio.create_task(session.tlt("pause", job))
        await session.until(lambda: session.fold(job).phase is Phase.PAUSED, "pause")
    await pause
    await session.until(lambda: session.status(job) == "paused", "pause")
    await session.tlt("resume", job)
    await session.assert_unharmed(job, expected)
    assert_versions(session, job)


async def test_unfinished_answers_of_the_next_step_go_on_with_their_tokens(
    session: LocalSession, two_steps: JobSpec
) -> None:
    expected = await session.undisturbed(two_steps)
    with session.gates.hold("train-1-answered"):
        async with begun(session, two_steps) as job:
            await session.arrived("train-1-answered")
        # the first step ends while w1 stands at the second one's answers
        await session.reached(job, Phase.POLICY_UPDATE)
        await session.obeyed(WorkerId("w1"))
    await session.assert_unharmed(job, expected)
    assert_versions(session, job)
    cut = {(e.step, e.prompt, e.member): e.answer for e in session.events(job, RolloutCut)}
    cut = {key: answer for key, answer in cut.items() if answer is not None}
    assert cut
    ended = {(e.step, e.prompt, e.member): e.answer for e in session.events(job, RolloutFinished)}
    for key, before in cut.items():
        tokens = session.answers(job).read(before).tokens
        assert session.answers(job).read(ended[key]).tokens[: len(tokens)] == tokens


async def test_a_job_that_starts_from_a_checkpoint_takes_up_the_next_step(
    session: LocalSession, two_steps: JobSpec
) -> None:
    """Its prompts were issued before the checkpoint was made."""
    await session.all_up()
    first = await session.submit(changed(two_steps, algorithm={"keep_all": True}))
    await session.done(first)
    file = write_spec(session, two_steps)
    again = JobId((await session.json("submit", file, "--from", f"{first}@2"))["job"])
    await session.done(again)
    for step in (2, 3):
        ours, theirs = (
            {event.prompt for event in _of_step(session, job, step)} for job in (again, first)
        )
        assert ours == theirs
