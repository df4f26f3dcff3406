"""What is used is committed to the run's folder; what was lost before that ends no job."""

from pathlib import Path

import pytest

from tests.samples import JOB, SPEC
from tlt.actors.coordinator import Coordinator
from tlt.actors.effects import Caused
from tlt.blobs import Blobs
from tlt.config import SessionSpec
from tlt.dataset import Prompts, prompts_file
from tlt.errors import BlobError
from tlt.ids import Digest, DrafterVersion, PolicyVersion
from tlt.json_logs import serve_run
from tlt.protocol.commands import CommitBestPolicy, CommitDrafter
from tlt.protocol.events import AnyEvent, DrafterCommitFailed, JobCancelRequested
from tlt.protocol.refs import BlobRef, DrafterRef, PolicyRef
from tlt.store.job_records import new_record


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    return _coordinator(tmp_path, "redis://127.0.0.1:1")  # nobody speaks to it


def _coordinator(tmp_path: Path, redis_url: str) -> Coordinator:
    spec = SessionSpec(
        name=tmp_path.name,
        folder=str(tmp_path / "session"),
        runs=str(tmp_path / "runs"),
        flight=str(tmp_path / "flight"),
        redis_url=redis_url,
    )
    made = Coordinator(spec)
    made.effects.records[JOB] = new_record(JOB, SPEC, str(tmp_path / "run"))
    return made


def _kept(weights: BlobRef, version: int = 1) -> Caused:
    drafter = DrafterRef(
        version=DrafterVersion(version),
        weights=weights,
        policy=PolicyVersion(0),
        architecture=Digest("shape"),
    )
    return Caused(
        CommitDrafter(job=JOB, drafter=drafter), JobCancelRequested(job=JOB), by_session=False
    )


def test_a_drafter_that_was_lost_does_not_keep_others_from_being_kept(
    coordinator: Coordinator,
) -> None:
    blobs = coordinator._blobs(JOB)
    here, lost, torn = (
        blobs.put(content, commit=False) for content in (b"drafter", b"gone", b"torn")
    )
    blobs.release(lost)
    (blobs.flight / torn.digest).write_bytes(b"to")
    not_kept = coordinator._commit_blobs(JOB, [_kept(lost), _kept(torn, 2), _kept(here, 3)])
    assert [event.version for event in not_kept] == [1, 2]
    assert "neither in" in not_kept[0].error
    assert "2 bytes, 4 expected" in not_kept[1].error
    assert [path.name for path in blobs.committed.iterdir()] == [here.digest]


async def test_that_a_drafter_was_not_kept_is_said(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = _coordinator(tmp_path, redis_url)
    lost = BlobRef(digest=Digest("gone"), bytes=1)

    async def decide(_: AnyEvent, caused: list[Caused]) -> None:
        caused.append(_kept(lost, version=7))

    async with coordinator.connection:
        await coordinator._recover()
        coordinator.effects.records[JOB] = new_record(JOB, SPEC, str(tmp_path / "run"))
        for part in ("train", "eval"):
            Prompts.write(prompts_file(tmp_path / "run", part), [])
        run = await coordinator._open_run(JOB, SPEC)
        monkeypatch.setattr(coordinator, "_decide", decide)
        await coordinator._commit([JobCancelRequested(job=JOB)], [])
        said = [entry.message for entry in await coordinator.consumer.read(10, 100)]
    serve_run(None)
    for opened in (coordinator.session, run, *coordinator.effects.prompts.values()):
        opened.close()
    assert [e.version for e in said if isinstance(e, DrafterCommitFailed)] == [7]


def test_a_folder_that_takes_nothing_ends_the_job(coordinator: Coordinator, tmp_path: Path) -> None:
    """It can do without a drafter in there, and not without a policy."""
    here = Blobs(coordinator.spec.job_flight(JOB), tmp_path).put(b"weights", commit=False)
    (tmp_path / "run").write_text("not a folder")
    (not_kept,) = coordinator._commit_blobs(JOB, [_kept(here)])
    assert "cannot be written" in not_kept.error
    best = CommitBestPolicy(
        job=JOB, policy=PolicyRef(version=PolicyVersion(1), weights=here), mean=1.0
    )
    caused = Caused(best, JobCancelRequested(job=JOB), by_session=False)
    with pytest.raises(BlobError, match="cannot be written"):
        coordinator._commit_blobs(JOB, [caused])
