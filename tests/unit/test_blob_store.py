"""Blobs in a store are read on other hosts, and what the store lacks or damages is noticed."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tlt.blobs.blob_files import Blobs, StoredBlobs, blobs_of_run, committed_blobs, place_blobs
from tlt.blobs.blob_url_store import BlobStore, blobs_url, local_folder, open_store
from tlt.errors import BlobLost, ConfigError, StoreUnreachable, find_remedy
from tlt.protocol.refs import BlobRef

URL = "memory://bucket/grpo-1"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[StoredBlobs]:
    yield StoredBlobs(tmp_path / "host", BlobStore(URL))
    _memory().rm("/bucket", recursive=True)


@pytest.fixture
def other_host(tmp_path: Path) -> StoredBlobs:
    return StoredBlobs(tmp_path / "other-host", BlobStore(URL))


def _memory() -> fsspec.AbstractFileSystem:
    return fsspec.filesystem("memory")


def _object(ref: BlobRef) -> str:
    return f"/bucket/grpo-1/{ref.digest}"


def test_another_host_reads_what_one_has_committed(
    host: StoredBlobs, other_host: StoredBlobs
) -> None:
    ref = host.put(b"weights", commit=True)
    assert not other_host.has(ref)
    assert other_host.path(ref).read_bytes() == b"weights"
    assert other_host.has(ref)
    other_host.release(ref)
    assert other_host.verify(ref).parent == other_host.flight
    assert other_host.get(ref) == b"weights"
    assert other_host.read_committed(ref, 2, 3) == b"igh"
    assert other_host.committed_names() == {ref.digest}


def test_a_blob_in_flight_is_not_in_the_store_until_it_is_committed(
    host: StoredBlobs, other_host: StoredBlobs
) -> None:
    ref = host.put(b"weights", commit=False)
    with pytest.raises(BlobLost, match=f"{URL}/{ref.digest}: is gone"):
        other_host.get(ref)
    host.commit(ref)
    assert other_host.get(ref) == b"weights"
    host.release(ref)
    host.commit(ref)  # again, after a coordinator's restart


def test_what_is_neither_here_nor_there_cannot_be_committed(host: StoredBlobs) -> None:
    host.put(b"other", commit=True)
    ref = host.put(b"weights", commit=False)
    host.release(ref)
    with pytest.raises(BlobLost, match="neither in"):
        host.commit(ref)


def test_a_partial_object_is_replaced_and_never_read(
    host: StoredBlobs, other_host: StoredBlobs
) -> None:
    ref = host.put(b"weights", commit=False)
    _memory().pipe_file(_object(ref), b"wei")
    with pytest.raises(BlobLost, match="3 bytes, 7 expected"):
        other_host.get(ref)
    host.commit(ref)
    assert other_host.get(ref) == b"weights"


def test_a_damaged_object_is_never_read(host: StoredBlobs, other_host: StoredBlobs) -> None:
    ref = host.put(b"weights", commit=True)
    _memory().pipe_file(_object(ref), b"weighed")
    for read in (other_host.get, other_host.path, other_host.verify):
        with pytest.raises(BlobLost, match="do not have the checksum"):
            read(ref)
    assert [each for each in other_host.flight.iterdir() if each.name[0] != "."] == []


def test_a_damaged_copy_is_replaced_by_the_stores(host: StoredBlobs) -> None:
    ref = host.put(b"weights", commit=True)
    for read in (host.get, host.verify):
        (host.flight / ref.digest).write_bytes(b"wei")
        read(ref)
        assert host.path(ref).read_bytes() == b"weights"


def test_discards_nothing_of_another_job(host: StoredBlobs, tmp_path: Path) -> None:
    refs = [host.put(content, commit=True) for content in (b"1", b"2", b"3")]
    other_job = StoredBlobs(tmp_path / "host", BlobStore("memory://bucket/grpo-10"))
    theirs = other_job.put(b"3", commit=True)
    host.discard(refs[0])
    host.discard(refs[0])
    host.discard_all_but(refs[1:2])
    assert host.committed_names() == {refs[1].digest}
    assert other_job.committed_names() == {theirs.digest}


@pytest.mark.parametrize("others", ["the same store", "another store", "a folder"])
def test_a_job_keeps_a_blob_of_another_one(others: str, host: StoredBlobs, tmp_path: Path) -> None:
    if others == "a folder":
        source = Blobs(tmp_path / "f", tmp_path / "run" / "blobs")
    else:
        (tmp_path / "store").mkdir()
        url = f"local://{tmp_path}/store" if others == "another store" else f"{URL}-other"
        source = StoredBlobs(tmp_path / "f", BlobStore(url))
    ref = source.put(b"weights", commit=True)
    source.release(ref)
    host.share(ref, source)
    source.discard(ref)
    assert host.get(ref) == b"weights"


def test_a_folder_keeps_a_blob_of_a_store(host: StoredBlobs, tmp_path: Path) -> None:
    ref = host.put(b"weights", commit=True)
    own = Blobs(tmp_path / "f", tmp_path / "run" / "blobs")
    own.share(ref, host)
    host.discard(ref)
    assert own.get(ref) == b"weights"


def test_a_run_says_where_its_blobs_are(host: StoredBlobs, tmp_path: Path) -> None:
    ref = host.put(b"weights", commit=True)
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    assert blobs_of_run(run, tmp_path).committed == run / "blobs"
    place_blobs(run, f"file://{elsewhere}")
    assert blobs_of_run(run, tmp_path).committed == elsewhere
    place_blobs(run, URL)
    with committed_blobs(run) as blobs:
        copy = blobs.verify(ref)
        assert copy.read_bytes() == b"weights"
    assert not copy.exists()


@pytest.mark.parametrize(
    ("place", "url"),
    [
        ("/shared/blobs", "file:///shared/blobs"),
        ("file:///shared/blobs/", "file:///shared/blobs"),
        ("s3://bucket/folder/", "s3://bucket/folder"),
        ("abfs://container@account/folder", "abfs://container@account/folder"),
    ],
)
def test_reads_paths_and_urls(place: str, url: str) -> None:
    assert blobs_url(place) == url
    assert (local_folder(url) == Path("/shared/blobs")) == url.startswith("file")


@pytest.mark.parametrize(
    "place", ["s3://key:hidden@bucket/folder", "s3://bucket/folder?secret=hidden"]
)
def test_refuses_a_url_with_credentials_and_does_not_repeat_them(place: str) -> None:
    with pytest.raises(ConfigError, match="must hold no credentials") as refused:
        blobs_url(place)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ("nowhere://bucket", "nowhere://bucket: cannot be written: Protocol not known: nowhere"),
        ("file://runs", "write file:///, and then the path"),
        ("/proc/none", "No such file or directory"),
    ],
)
def test_refuses_a_place_that_it_cannot_use(place: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        open_store(place)


def test_names_the_package_that_is_missing() -> None:
    code = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from tlt.blobs.blob_url_store import open_store; open_store('s3://bucket')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip().splitlines()[-1] == (
        "tlt.errors.ConfigError: --blobs s3://bucket: cannot be written: Install s3fs to access S3"
    )


def test_a_host_that_sees_another_store_says_so(host: StoredBlobs) -> None:
    with host.store.probe() as probe:
        host.store.find(probe)
        with pytest.raises(StoreUnreachable, match="cannot be read"):
            BlobStore(f"{URL}-other").find(probe)
    with pytest.raises(StoreUnreachable):
        host.store.find(probe)
    assert host.committed_names() == set()
    # the fixture removes the store
    host.put(b"", commit=True)


def test_a_store_that_fails_is_waited_for(host: StoredBlobs, tmp_path: Path) -> None:
    host.put(b"", commit=True)
    blobs = StoredBlobs(tmp_path / "f", BlobStore("local:///proc/none"))
    with pytest.raises(StoreUnreachable, match="cannot be written") as raised:
        blobs.put(b"weights", commit=True)
    assert find_remedy(raised.value) == "Once this store answers, the job goes on by itself"
    with pytest.raises(StoreUnreachable):
        blobs.check_place()
