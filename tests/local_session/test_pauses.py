"""A paused job gives its workers to the next one, and later goes on as if nothing had happened."""

import asyncio

from tests.local_session.session import LocalSession, changed
from tlt.base.id_types import JobId, WorkerId
from tlt.policies.run.run_state import Phase
from tlt.protocol.events import RolloutCut, RolloutFinished
from tlt.spec.config import JobSpec


async def test_goes_on_after_a_pause_with_the_same_rewards(
    alone: LocalSession, spec: JobSpec
) -> None:
    """Another job runs meanwhile, and the coordinator is killed while the job is paused."""
    expected = await alone.undisturbed(spec)
    with alone.gates.hold("train-1-answered"):
        paused = await alone.submit(spec)
        other = await alone.submit(changed(spec, algorithm={"steps": 1}))
        rank = (await alone.arrived("train-1-answered"))[0]
        assert alone.status(other) == "queued"
        pause = asyncio.create_task(alone.tlt("pause", paused))
        # to cut its answers; then it waits for them
        await alone.until(lambda: alone.fold(paused).phase is Phase.PAUSED, "pause")
        await alone.obeyed(WorkerId(rank.partition(".")[0]), but=1)
    assert "is paused" in (await pause).stdout
    await alone.until(lambda: alone.status(paused) == "paused", "pause")
    assert f"tlt resume {paused}" in (await alone.tlt("jobs")).stdout
    await alone.kill_coordinator()
    alone.start_coordinator()
    await alone.done(other)
    assert f"{paused} is paused for" in (await alone.tlt("status")).stdout
    assert alone.fold(paused).phase is Phase.PAUSED

    await alone.tlt("resume", paused)
    found = await alone.assert_unharmed(paused, expected)
    assert found.losses == 0
    _assert_gone_on_with(alone, paused)
    refused = await alone.tlt("pause", paused, code=2)
    assert "a job that has ended can't be paused" in refused.stderr


def _assert_gone_on_with(session: LocalSession, job: JobId) -> None:
    """The answers that were cut begin with the tokens that they had."""
    cut = {(e.step, e.prompt, e.member): e.answer for e in session.events(job, RolloutCut)}
    cut = {key: answer for key, answer in cut.items() if answer is not None}
    assert cut
    finished = session.events(job, RolloutFinished)
    ended = {(e.step, e.prompt, e.member): e.answer for e in finished}
    for key, before in cut.items():
        tokens = session.answers(job).read(before).tokens
        assert session.answers(job).read(ended[key]).tokens[: len(tokens)] == tokens


async def test_a_paused_job_can_be_cancelled(alone: LocalSession, spec: JobSpec) -> None:
    with alone.gates.hold("train-0"):
        job = await alone.submit(spec)
        await alone.arrived("train-0")
        await alone.tlt("pause", job)
    await alone.tlt("cancel", job)
    assert alone.status(job) == "cancelled"
