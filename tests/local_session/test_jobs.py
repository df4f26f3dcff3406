"""Jobs wait for their turn, can be cancelled, and leave a journal that replays to the same end."""

from itertools import pairwise

import msgspec

from tests.local_session.session import LocalSession, changed
from tlt.policies.run import coordinator
from tlt.policies.run.run_state import Phase
from tlt.runs.run_folder_reader import open_ledger
from tlt.spec.config import JobSpec
from tlt.store.journal import FILE_NAME
from tlt.store.journal_replayed_state import replay


async def test_runs_queued_jobs_one_after_the_other(session: LocalSession, spec: JobSpec) -> None:
    with session.gates.hold("train-0"):
        jobs = [await session.submit(spec) for _ in range(3)]
        await session.arrived("train-0", 4)
        assert [session.status(job) for job in jobs] == ["running", "queued", "queued"]
        await session.tlt("cancel", jobs[0])
    ended = [(await session.ended(job)).status for job in jobs]
    assert ended == ["cancelled", "done", "done"]
    for one, next_ in pairwise(jobs):
        assert session.journal(one)[-1].at <= session.journal(next_)[0].at


async def test_cancels_a_running_and_a_queued_job(session: LocalSession, spec: JobSpec) -> None:
    with session.gates.hold("train-1-answered"):
        running, queued = [await session.submit(spec) for _ in range(2)]
        await session.arrived("train-1-answered")
        await session.tlt("cancel", queued)
        await session.tlt("cancel", running)
    listed = {each["job"]: each["status"] for each in await session.json("jobs")}
    assert listed == {running: "cancelled", queued: "cancelled"}
    assert "had ended already" in (await session.tlt("cancel", running)).stdout
    # the workers are free for the next job
    await session.done(await session.submit(spec))


async def test_replays_the_journal_to_the_same_commands(
    session: LocalSession, spec: JobSpec
) -> None:
    job = await session.submit(changed(spec, algorithm={"eval_every": 2}))
    snapshot = await session.done(job)
    assert [done.step for done in snapshot.evals] == [0, 2]
    blank = coordinator.new_run(job, open_ledger(session.run(job)).spec)
    state, position = replay(session.run(job) / FILE_NAME, blank, coordinator.decide)
    assert state.phase is Phase.ENDED
    assert position.entries == len(session.journal(job)) > 60


async def test_shows_steps_and_journal_in_logs(session: LocalSession, spec: JobSpec) -> None:
    job = await session.submit(spec)
    await session.done(job)
    shown = (await session.tlt("logs", job, "-f")).stdout
    assert "step 0: reward" in shown
    assert "step 1: version 2" in shown
    assert shown.rstrip().endswith("done")
    lines = (await session.tlt("logs", job, "--json")).stdout.splitlines()
    assert [msgspec.json.decode(line)["seq"] for line in lines] == list(range(len(lines)))


async def test_a_job_that_no_rank_can_load_fails_by_name(
    session: LocalSession, spec: JobSpec
) -> None:
    """A retry would fail as well, so no other worker tries."""
    session.refuse_jobs()
    record = await session.ended(await session.submit(spec))
    assert record.status == "failed"
    assert "it can't be loaded" in str(record.error)
