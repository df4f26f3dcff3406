"""A job keeps to the commit of the Hub's policy that it began with."""

from pathlib import Path

import pytest

from tests.hub_cache import COMMIT, NAME, NEXT, add_commit, move_ref, use_cache
from tests.local_session.conftest import POLICY
from tests.local_session.session import LocalSession, changed, local_session, write_spec
from tlt.base.id_types import JobId
from tlt.protocol.commands import StartJob
from tlt.report.summary import summarise
from tlt.runs.run_folder_reader import read_ledger
from tlt.spec.config import JobSpec
from tlt.store.embedded_redis import EmbeddedRedis


@pytest.fixture
def home(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache of two commits; `main` is the first."""
    home = short_folder / "home"
    use_cache(monkeypatch, home)
    add_commit(home, POLICY, COMMIT, "main")
    add_commit(home, POLICY, NEXT)
    return home


@pytest.fixture
def spec(spec: JobSpec, home: Path) -> JobSpec:
    return changed(spec, policy={"path": NAME}, algorithm={"steps": 4, "checkpoint_every": 2})


def commit_of(session: LocalSession, job: JobId) -> tuple[str, str]:
    """Return the commit that the run knows, and the folder that its ranks have read."""
    ledger = read_ledger(session.run(job))
    assert ledger.hub_policy is not None
    assert summarise(ledger.snapshot()).hub_policy == ledger.hub_policy
    return ledger.hub_policy.commit, Path(ledger.spec.policy.path).name


async def test_a_resumed_job_keeps_its_commit_when_the_branch_moves(
    short_folder: Path, own_redis: EmbeddedRedis, spec: JobSpec, home: Path
) -> None:
    async with local_session(short_folder, own_redis) as session:
        with session.gates.hold("train-3-answered"):
            job = await session.submit(spec)
            await session.arrived("train-3-answered")
            await session.end()
    move_ref(home, "main", NEXT)
    async with local_session(short_folder, own_redis, new=False) as session:
        await session.done(job)
        assert commit_of(session, job) == (COMMIT, COMMIT)
        state, record = session.state(job), session.record(job)
        assert state is None or Path(state.spec.policy.path).name == COMMIT
        assert record.spec == spec
        assert f"{NAME} at {COMMIT[:12]}" in (await session.tlt("logs", job)).stdout
        fresh = await session.submit(spec)
        await session.done(fresh)
        assert commit_of(session, fresh) == (NEXT, NEXT)


async def test_a_retry_and_a_job_from_a_checkpoint_take_the_recorded_commit(
    session: LocalSession, spec: JobSpec, home: Path
) -> None:
    with session.gates.hold("train-0"):
        early = await session.submit(spec)
        await session.arrived("train-0")
        await session.tlt("cancel", early)
    move_ref(home, "main", NEXT)
    again = JobId((await session.json("retry", early))["job"])
    await session.done(again)
    assert commit_of(session, again) == (COMMIT, COMMIT)
    longer = changed(spec, algorithm={"steps": 6})
    file = write_spec(session, longer)
    key = ("--idempotency-key", "once")
    onward = JobId((await session.json("submit", file, "--from", again, *key))["job"])
    await session.done(onward)
    assert (await session.json("submit", file, "--from", again, *key))["job"] == onward
    assert commit_of(session, onward) == (COMMIT, COMMIT)
    (began,) = session.events(onward, StartJob)
    assert began.starts_from.name == f"{again}@4"
    other = ("--set", f"policy.revision={NEXT}")
    refused = await session.tlt("submit", file, "--from", again, *other, code=2)
    assert f"policy.revision: {again} began with {NAME} at {COMMIT[:12]}" in refused.stderr
    refused = await session.tlt(
        "submit", file, "--from", again, "--set", "policy.path=org/other", code=2
    )
    assert f"policy.path: {again} began with {NAME}: name that instead" in refused.stderr
