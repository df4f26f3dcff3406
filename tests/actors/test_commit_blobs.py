"""Blobs in commands are committed, and a lost drafter ends no job."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tests.actors.test_startup_event_backlog import Session, consume, end, post
from tests.samples import JOB, SPEC
from tests.waiting import wait_until
from tlt.actors.coordinator.blob_commit_thread import BlobCommits, commit_blobs
from tlt.actors.coordinator.coordinator import Coordinator
from tlt.actors.coordinator.redis_effects import Caused
from tlt.actors.coordinator.write_retries import DiskWaits
from tlt.base.id_types import Digest, DrafterVersion, Epoch, PolicyVersion
from tlt.base.json_logs import serve_runs
from tlt.blobs.blob_files import Blobs, StoredBlobs
from tlt.blobs.blob_url_store import BlobStore
from tlt.data.dataset import Prompts, prompts_file
from tlt.errors import BlobError
from tlt.protocol.commands import CancelJob, CommitBestPolicy, CommitDrafter
from tlt.protocol.events import DrafterCommitFailed, SessionResumed
from tlt.protocol.refs import BlobRef, DrafterRef, PolicyRef
from tlt.spec.config import SessionSpec
from tlt.store.job_requests import new_record


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "flight", tmp_path / "run" / "blobs")


def _commit_drafter(weights: BlobRef, version: int = 1) -> Caused:
    drafter = DrafterRef(
        version=DrafterVersion(version),
        weights=weights,
        policy=PolicyVersion(0),
        architecture=Digest("shape"),
        updates=1,
        micro_batches=1,
    )
    return Caused(CommitDrafter(job=JOB, drafter=drafter), CancelJob(job=JOB), run=JOB)


def test_commits_drafters_after_one_that_was_lost(blobs: Blobs) -> None:
    whole, lost, torn = (
        blobs.put(content, commit=False) for content in (b"drafter", b"lost", b"torn")
    )
    blobs.release(lost)
    (blobs.flight / torn.digest).write_bytes(b"to")
    failures = commit_blobs(
        blobs, [_commit_drafter(lost), _commit_drafter(torn, 2), _commit_drafter(whole, 3)]
    )
    assert [event.version for event in failures] == [1, 2]
    assert "neither in" in failures[0].error
    assert "2 bytes, 4 expected" in failures[1].error
    assert [path.name for path in blobs.committed.iterdir()] == [whole.digest]


async def test_waits_for_a_store_that_does_not_answer(tmp_path: Path) -> None:
    blobs = StoredBlobs(tmp_path / "flight", BlobStore(f"local://{tmp_path}/store"))
    weights, drafter = (blobs.put(content, commit=False) for content in (b"policy", b"drafter"))
    policy = PolicyRef(version=PolicyVersion(1), weights=weights)
    best = CommitBestPolicy(job=JOB, policy=policy, mean=1.0)
    caused = [Caused(best, CancelJob(job=JOB), run=JOB), _commit_drafter(drafter)]
    waits, commits = DiskWaits(), BlobCommits()
    committing = asyncio.create_task(waits.retry(partial(commits.commit, blobs, caused)))
    await wait_until(lambda: waits.waiting is not None)
    assert str(waits.waiting).startswith(f"local://{tmp_path}/store: cannot be written: ")
    (tmp_path / "store").mkdir()
    assert await committing == []
    assert waits.waiting is None
    assert blobs.committed_names() == {weights.digest, drafter.digest}
    commits.discard(blobs, [drafter])
    commits.discard_all_but(blobs, [])
    await wait_until(lambda: not blobs.committed_names())


async def test_posts_an_event_for_a_drafter_that_was_not_committed(
    redis_url: str, tmp_path: Path
) -> None:
    coordinator = Coordinator(
        SessionSpec(
            name=tmp_path.name,
            folder=str(tmp_path / "session"),
            runs=str(tmp_path / "runs"),
            flight=str(tmp_path / "flight"),
            redis_url=redis_url,
        )
    )
    lost = BlobRef(digest=Digest("lost"), bytes=1)
    async with coordinator.effects.connection:
        await coordinator.recover()
        coordinator.effects.records[JOB] = new_record(JOB, SPEC, str(tmp_path / "run"))
        for part in ("train", "eval"):
            Prompts.write(prompts_file(tmp_path / "run", part), [])
        run = await coordinator.deciders.runs.open(JOB, SPEC)
        run.decide(SessionResumed(epoch=Epoch(0), blobs_kept=True), 0.0)
        await coordinator.committer.commit([_commit_drafter(lost, version=7)], [])
        events = [entry.message for entry in await coordinator.committer.consumer.read(10, 100)]
    serve_runs([])
    assert coordinator.lock is not None
    coordinator.lock.close()
    coordinator.effects.close_run(JOB)
    for opened in (coordinator.deciders.session, run):
        opened.close()
    assert [e.version for e in events if isinstance(e, DrafterCommitFailed)] == [7]


def test_fails_if_the_policy_cannot_be_written_but_not_for_a_drafter(
    blobs: Blobs, tmp_path: Path
) -> None:
    weights = blobs.put(b"weights", commit=False)
    (tmp_path / "run").write_text("not a folder")
    (failure,) = commit_blobs(blobs, [_commit_drafter(weights)])
    assert "cannot be written" in failure.error
    best = CommitBestPolicy(
        job=JOB, policy=PolicyRef(version=PolicyVersion(1), weights=weights), mean=1.0
    )
    caused = Caused(best, CancelJob(job=JOB), run=JOB)
    with pytest.raises(BlobError, match="cannot be written"):
        commit_blobs(blobs, [caused])


async def test_a_job_that_ends_removes_what_killed_writers_left(
    redis_url: str, tmp_path: Path
) -> None:
    session = Session(tmp_path, redis_url)
    coordinator = session.coordinator()
    coordinator.committer.summaries.start = lambda folder: None
    await coordinator.recover()
    await post(coordinator, session.begin())
    await consume(coordinator)
    left = coordinator.deciders.runs.blobs(JOB).committed / ".unfinished-x1"
    left.parent.mkdir()
    left.write_bytes(b"half")
    await post(coordinator, [CancelJob(job=JOB)])
    await consume(coordinator)
    assert coordinator.effects.records[JOB].status == "cancelled"
    await wait_until(lambda: not left.exists())
    await end(coordinator)
