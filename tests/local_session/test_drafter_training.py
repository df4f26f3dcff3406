"""Workers without prompts train the drafter, whatever dies meanwhile; the answers stay the same."""

from pathlib import Path

import pytest

from tests.local_session.session import LocalSession, changed, rewards, write_spec
from tlt.base.id_types import JobId
from tlt.protocol.commands import StartJob
from tlt.protocol.events import (
    DrafterDeltaReady,
    DrafterMerged,
    DrafterRefused,
    DrafterTrainingStopped,
    RolloutFinished,
    WorkerLost,
)
from tlt.report import Ledger
from tlt.runs.run_folder_reader import read_ledger
from tlt.spec.config import JobSpec


@pytest.fixture
def spec(spec: JobSpec) -> JobSpec:
    """Return a job whose first worker has slots for all answers, so that the other one idles."""
    return changed(
        spec,
        algorithm={"steps": 3},
        rollout={"slots": 16, "spread": False},
        speculation={"mode": "adaptive", "depths": (2,), "ngrams": ()},
        drafter={"train": "always", "merge_every": 1},
    )


def merged(session: LocalSession, job: JobId) -> list[DrafterMerged]:
    return session.events(job, DrafterMerged)


async def train_in_step(session: LocalSession, spec: JobSpec, gate: str) -> JobId:
    """Submit a job whose decoding worker waits at a gate until a drafter is in use."""
    job = await session.submit(spec)
    await session.arrived(gate)
    await session.until(lambda: used_drafter(session, job), "adopted drafter")
    return job


def used_drafter(session: LocalSession, job: JobId) -> int | None:
    state = session.state(job)
    used = None if state is None else state.drafter.adoption.used
    return None if used is None else used.version


def ledger(session: LocalSession, job: JobId) -> Ledger:
    return read_ledger(session.run(job))


def proposing(session: LocalSession, job: JobId) -> set[int | None]:
    """Return the drafter versions that answers name."""
    finished = session.events(job, RolloutFinished)
    return {counts.drafter for event in finished for counts in event.accepted}


async def test_an_idle_worker_trains_a_drafter_that_is_adopted(
    session: LocalSession, spec: JobSpec
) -> None:
    plain = changed(spec, drafter={"train": "off"})
    expected = await session.undisturbed(plain)
    with session.gates.hold("train-1-answered"):
        job = await train_in_step(session, spec, "train-1-answered")
        adopted = used_drafter(session, job)
    found = await session.assert_unharmed(job, expected)
    deltas, bases = session.events(job, DrafterDeltaReady), merged(session, job)
    versions = [event.base.version for event in bases]
    assert versions == sorted(set(versions))
    assert adopted in versions
    assert deltas
    assert sum(event.tokens.others for event in deltas) > 0
    stopped = session.events(job, DrafterTrainingStopped)
    assert stopped
    assert proposing(session, job) & set(versions)
    assert found.drafter_training is not None
    shown = (await session.tlt("ledger", job)).stdout
    for words in ("idle device-seconds", "micro-batches", "stopped by command"):
        assert words in shown


@pytest.mark.parametrize("victim", ["trains", "decodes"])
async def test_survives_a_rank_that_dies_while_another_worker_trains(
    session: LocalSession, spec: JobSpec, victim: str
) -> None:
    expected = await session.undisturbed(changed(spec, drafter={"train": "off"}))
    with session.gates.hold("train-1-answered"):
        job = await train_in_step(session, spec, "train-1-answered")
        decoding = session.gates.arrived("train-1-answered").pop().partition(".")[0]
        other = "w1" if decoding == "w0" else "w0"
        await session.kill_rank(decoding if victim == "decodes" else other, 0)
        await session.until(lambda: session.events(job, WorkerLost), "loss")
    await session.assert_unharmed(job, expected)


async def test_the_drafter_outlasts_the_coordinator(session: LocalSession, spec: JobSpec) -> None:
    expected = await session.undisturbed(changed(spec, drafter={"train": "off"}))
    with session.gates.hold("train-1-answered"):
        job = await train_in_step(session, spec, "train-1-answered")
        await session.kill_coordinator()
        before = {event.base.version for event in merged(session, job)}
        session.start_coordinator()
        await session.until(
            lambda: {event.base.version for event in merged(session, job)} > before, "next merge"
        )
    await session.assert_unharmed(job, expected)


async def test_replaces_ranks_that_do_not_stop_training(
    session: LocalSession, spec: JobSpec
) -> None:
    spec = changed(spec, drafter={"stop_seconds": 2.0})
    expected = await session.undisturbed(changed(spec, drafter={"train": "off"}))
    with session.gates.hold("stop"):
        job = await session.submit(spec)
        await session.arrived("stop")
        await session.until(lambda: session.events(job, WorkerLost), "loss")
    await session.assert_unharmed(job, expected)
    assert any("its ranks trained on" in each.reason for each in session.events(job, WorkerLost))
    assert "its ranks trained on" in (await session.tlt("logs", job)).stdout


async def test_a_job_that_starts_from_another_proposes_with_its_drafter(
    session: LocalSession, spec: JobSpec
) -> None:
    await session.all_up()
    with session.gates.hold("train-2-answered"):
        job = await train_in_step(session, spec, "train-2-answered")
    await session.done(job)
    used = ledger(session, job).state.drafter.adoption.used
    assert used is not None
    longer = write_spec(session, changed(spec, algorithm={"steps": 4}))
    again = JobId((await session.json("submit", longer, "--from", job))["job"])
    await session.done(again)
    began = session.journal(again)[0].event
    assert isinstance(began, StartJob)
    assert began.starts_from is not None
    assert began.starts_from.drafter == used
    assert used.version in proposing(session, again)
    assert all(event.base.micro_batches > used.micro_batches for event in merged(session, again))


async def test_decodes_without_a_drafter_that_cannot_be_used(
    session: LocalSession, spec: JobSpec, tmp_path: Path
) -> None:
    plain = changed(spec, drafter={"train": "off"})
    expected = await session.undisturbed(plain)
    job = await session.submit(changed(plain, drafter={"path": str(tmp_path / "nowhere")}))
    found = await session.done(job)
    assert rewards(found) == expected
    refusals = session.events(job, DrafterRefused)
    assert refusals
    assert all("nowhere" in event.error for event in refusals)
    assert "decodes without the drafter" in (await session.tlt("logs", job)).stdout
    assert f"refused by {refusals[0].worker}: " in (await session.tlt("ledger", job)).stdout


async def test_pausing_ends_drafter_training(session: LocalSession, spec: JobSpec) -> None:
    expected = await session.undisturbed(changed(spec, drafter={"train": "off"}))
    with session.gates.hold("train-1-answered"):
        job = await train_in_step(session, spec, "train-1-answered")
        await session.tlt("pause", job)
    await session.until(lambda: session.status(job) == "paused", "pause")
    await session.tlt("resume", job)
    await session.assert_unharmed(job, expected)
