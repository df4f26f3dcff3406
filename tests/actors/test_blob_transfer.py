"""Find the blobs that a message names, and give no other files to other hosts."""

from pathlib import Path

import pytest

from tlt.actors.blobs_between_hosts import (
    blob_file,
    read_part,
    referenced_blobs,
    remove_job_folder,
)
from tlt.base.id_types import Digest, DrafterVersion, JobId, PolicyVersion
from tlt.errors import BlobError
from tlt.protocol.refs import BlobRef, Checkpoint, DrafterBase, PolicyRef
from tlt.spec.config import SessionSpec

JOB = JobId("job-1")


def blob(name: str) -> BlobRef:
    return BlobRef(digest=Digest(name), bytes=1)


def session(flight: Path) -> SessionSpec:
    return SessionSpec(name="s", folder="/s", runs="/r", flight=str(flight), redis_url="unix:///r")


def test_finds_blobs_wherever_a_message_names_them() -> None:
    checkpoint = Checkpoint(
        version=PolicyVersion(1),
        weights=blob("a"),
        optimiser=None,
        optimiser_shards={"0": blob("b"), "1": blob("c")},
    )
    policy = PolicyRef(version=PolicyVersion(2), weights=blob("d"), adapter=blob("e"))
    base = DrafterBase(
        version=DrafterVersion(0), root=DrafterVersion(0), weights=None, updates=0, micro_batches=0
    )
    found = referenced_blobs((checkpoint, (policy, base), None, "f"))
    assert [ref.digest for ref in found] == ["a", "b", "c", "d", "e"]


def test_reads_a_part_of_a_blob(tmp_path: Path) -> None:
    file = blob_file(session(tmp_path), JOB, Digest("ab12"))
    file.parent.mkdir()
    file.write_bytes(b"0123456789")
    assert read_part(file, 4, 3) == b"456"
    assert read_part(file, 8, 100) == b"89"
    assert file.parent == tmp_path / JOB


@pytest.mark.parametrize("name", ["../secret", "", "a/b", "..", ".owner"])
def test_gives_away_no_other_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(BlobError, match="is no digest"):
        blob_file(session(tmp_path), JOB, Digest(name))


@pytest.mark.parametrize("job", ["..", ".", "", "a/b", "/etc"])
def test_gives_away_no_file_of_another_folder(tmp_path: Path, job: str) -> None:
    with pytest.raises(BlobError, match="is no job"):
        blob_file(session(tmp_path), JobId(job), Digest("ab12"))
    with pytest.raises(BlobError, match="is no job"):
        remove_job_folder(session(tmp_path), JobId(job))


def test_removes_the_folder_of_one_job(tmp_path: Path) -> None:
    for job in (JOB, JobId("job-2")):
        file = blob_file(session(tmp_path), job, Digest("ab12"))
        file.parent.mkdir()
        file.touch()
    for _ in range(2):  # twice, because ranks remove it, too
        remove_job_folder(session(tmp_path), JOB)
        assert [place.name for place in tmp_path.iterdir()] == ["job-2"]
