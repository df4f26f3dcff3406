"""A step ends with enough complete groups; the others go on in the next one, or are put off."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.local_session.session import LocalSession, changed
from tlt.base.id_types import JobId, WorkerId
from tlt.policies.run.run_state import Phase
from tlt.protocol.commands import IssuePrompts
from tlt.protocol.events import RolloutCut, RolloutFinished, WorkerLost
from tlt.runs.run_folder_reader import open_ledger
from tlt.spec.config import JobSpec


@pytest.fixture
def partial(spec: JobSpec) -> JobSpec:
    return changed(spec, algorithm={"steps": 4, "checkpoint_every": 2}, rollout={"partial": 0.5})


@asynccontextmanager
async def late(session: LocalSession, spec: JobSpec) -> AsyncIterator[JobId]:
    """Start a job whose first step ends while a worker is writing its answers."""
    with session.gates.hold("train-0-w1"):
        with session.gates.hold("train-0"):
            await session.all_up()
            job = await session.submit(spec)
            await session.arrived("train-0", 4)
        await session.reached(job, Phase.POLICY_UPDATE)
        await session.obeyed(WorkerId("w1"))
        yield job


async def test_answers_go_on_with_the_tokens_that_they_had(
    session: LocalSession, partial: JobSpec
) -> None:
    async with late(session, partial) as job:
        pass
    snapshot = await session.done(job)
    session.assert_nothing_lost_or_doubled(job)
    cut = {
        (event.step, event.prompt, event.member): event
        for event in session.events(job, RolloutCut)
        if event.answer is not None
    }
    finished = session.events(job, RolloutFinished)
    gone_on = [e for e in finished if (e.step, e.prompt, e.member) in cut]
    assert gone_on
    for event in gone_on:
        before = session.answers(job).read(cut[event.step, event.prompt, event.member].answer)
        after = session.answers(job).read(event.answer)
        assert after.tokens[: len(before.tokens)] == before.tokens
        assert event.attempt > 0
    assert len(snapshot.steps) == 4
    # every step learns from as many groups
    assert {step.rollouts for step in snapshot.steps} == {16}


async def test_a_worker_may_die_before_it_cuts_its_answers(
    session: LocalSession, partial: JobSpec
) -> None:
    async with late(session, partial) as job:
        await session.kill_rank("w1", 1)
        await session.until(lambda: session.events(job, WorkerLost), "loss")
    snapshot = await session.done(job)
    session.assert_nothing_lost_or_doubled(job)
    assert {step.rollouts for step in snapshot.steps} == {16}


async def test_a_worker_may_die_with_answers_that_it_went_on_with(
    session: LocalSession, partial: JobSpec
) -> None:
    async with late(session, partial) as job:
        pass
    with session.gates.hold("train-1-answered"):
        await session.arrived("train-1-answered")
        await session.kill_rank("w0", 0)
        await session.until(lambda: session.events(job, WorkerLost), "loss")
    await session.done(job)
    session.assert_nothing_lost_or_doubled(job)


@pytest.fixture
def deferring(spec: JobSpec) -> JobSpec:
    return changed(spec, algorithm={"steps": 5}, rollout={"defer_long": 0.5})


def issued(session: LocalSession, job: JobId) -> list[int]:
    """Return how many groups each step issued."""
    ledger = open_ledger(session.run(job))
    changes = [ledger.add(entry.event, entry.at) for entry in session.journal(job)]
    commands = [command for change in changes for command in change.commands]
    return [
        len(command.prompts)
        for command in commands
        if isinstance(command, IssuePrompts) and command.purpose == "train"
    ]


async def test_groups_that_are_put_off_are_a_step_of_their_own(
    session: LocalSession, deferring: JobSpec
) -> None:
    async with late(session, deferring) as job:
        pass
    snapshot = await session.done(job)
    assert {step.rollouts for step in snapshot.steps} == {16}
    # two steps put two groups off each; the last one has no later step to put any off to
    assert issued(session, job) == [6, 6, 4, 6, 4]
    cut = session.events(job, RolloutCut)
    assert cut
    assert all(event.answer is None for event in cut)
    finished = session.events(job, RolloutFinished)
    assert all(len(session.answers(job).read(e.answer).policies) == 1 for e in finished)


async def test_a_worker_may_die_with_answers_that_are_put_off(
    session: LocalSession, deferring: JobSpec
) -> None:
    """Its prompts go back to the queue, where the next step finds and drops them."""
    async with late(session, deferring) as job:
        await session.kill_rank("w1", 1)
        await session.until(lambda: session.events(job, WorkerLost), "loss")
    snapshot = await session.done(job)
    assert {step.rollouts for step in snapshot.steps} == {16}
    assert issued(session, job) == [6, 6, 4, 6, 4]


async def test_evaluations_wait_for_no_answer_that_was_carried_over(
    session: LocalSession, partial: JobSpec
) -> None:
    job = await session.submit(changed(partial, algorithm={"eval_every": 1}))
    snapshot = await session.done(job)
    session.assert_nothing_lost_or_doubled(job)
    assert [each.problems for each in snapshot.evals] == [6] * 5
