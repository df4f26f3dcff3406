"""A blob is complete and has the checksum in its name, or there is an error."""

import hashlib
import itertools
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.interrupts import interrupting_checks
from tlt.base.id_types import Digest
from tlt.base.interrupt_check import Interrupted, never_interrupt
from tlt.blobs import verified_files
from tlt.blobs.blob_digest import (
    LEAF_BYTES,
    LEAVES_AHEAD,
    Leaf,
    digest_file,
    leaves_of,
    name_sums,
    write_share,
)
from tlt.blobs.blob_files import Blobs, remove_unfinished
from tlt.errors import BlobError, BlobLost
from tlt.protocol.refs import BlobRef


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "flight", tmp_path / "committed")


@pytest.mark.parametrize("commit", [False, True])
def test_returns_stored_bytes(commit: bool, blobs: Blobs) -> None:
    ref = blobs.put(b"some bytes", commit=commit)
    assert blobs.get(ref) == b"some bytes"
    assert blobs.path(ref) == (blobs.committed if commit else blobs.flight) / ref.digest
    assert blobs.put(bytearray(b"some bytes"), commit=commit) == ref
    assert blobs.put(b"other bytes", commit=commit) != ref


def test_view_of_wider_items_counts_in_bytes(blobs: Blobs) -> None:
    array = np.arange(100, dtype=np.float32)
    ref = blobs.put(memoryview(array), commit=False)
    assert ref.bytes == 400
    assert blobs.get(ref) == array.tobytes()


def test_committed_blob_stays_when_flight_is_released(blobs: Blobs) -> None:
    ref = blobs.put(b"weights", commit=False)
    path = blobs.commit(ref)
    assert path.read_bytes() == b"weights"
    blobs.release(ref)
    blobs.release(ref)
    assert list(blobs.flight.iterdir()) == []
    assert blobs.path(ref) == path
    assert blobs.commit(ref) == path


@pytest.mark.parametrize("disk", ["same", "other"])
def test_shared_blob_stays_when_the_other_run_discards_it(
    disk: str, blobs: Blobs, tmp_path: Path, short_folder: Path
) -> None:
    """A link serves on one disk, and a copy on two."""
    ref = blobs.put(b"weights", commit=True)
    shared_memory = Path("/dev/shm") / short_folder.name
    own = Blobs(tmp_path / "f", tmp_path / "own" if disk == "same" else shared_memory)
    try:
        own.share(ref, blobs)
        blobs.discard(ref)
        assert own.get(ref) == b"weights"
        with pytest.raises(BlobLost):
            Blobs(tmp_path / "f", tmp_path / "third").share(ref, blobs)
    finally:
        shutil.rmtree(shared_memory, ignore_errors=True)


def test_released_blob_cannot_be_read(blobs: Blobs) -> None:
    ref = blobs.put(b"weights", commit=False)
    blobs.release(ref)
    complaint = f"blob {ref.digest} is neither in {blobs.flight} nor in {blobs.committed}"
    for use in (blobs.get, blobs.path, blobs.commit):
        with pytest.raises(BlobError, match=complaint):
            use(ref)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"weighs!", "checksum"), (b"weigh", "5 bytes, 7 expected"), (b"", "0 bytes, 7 expected")],
)
def test_refuses_a_damaged_blob(content: bytes, complaint: str, blobs: Blobs) -> None:
    ref = blobs.put(b"weights", commit=False)
    (blobs.flight / ref.digest).write_bytes(content)
    for use in (blobs.get, blobs.commit):
        with pytest.raises(BlobError, match=complaint):
            use(ref)
    assert not (blobs.committed / ref.digest).exists()


def test_reads_the_committed_copy_if_the_one_in_flight_is_damaged(blobs: Blobs) -> None:
    ref = blobs.put(b"weights", commit=False)
    path = blobs.commit(ref)
    (blobs.flight / ref.digest).write_bytes(b"wei")
    assert blobs.get(ref) == b"weights"
    assert blobs.verify(ref) == path
    path.write_bytes(b"weighs!")
    with pytest.raises(BlobError, match="checksum"):
        blobs.get(ref)


def test_names_a_blob_that_cannot_be_read(blobs: Blobs) -> None:
    ref = BlobRef(digest=Digest("00"), bytes=1)
    (blobs.flight / "00").mkdir(parents=True)
    with pytest.raises(BlobError, match="00: cannot be read: Is a directory"):
        blobs.get(ref)


def test_folders_hold_only_complete_files(blobs: Blobs) -> None:
    refs = [blobs.put(bytes([n]) * 1000, commit=n % 2 == 0) for n in range(6)]
    names = {path.name for folder in (blobs.flight, blobs.committed) for path in folder.iterdir()}
    assert names == {ref.digest for ref in refs}


@pytest.mark.parametrize("commit", [False, True])
def test_accepts_a_writer_that_replaces_the_file(
    commit: bool, blobs: Blobs, tmp_path: Path
) -> None:
    """The writer replaces the file, as safetensors does."""

    def write(file: Path) -> None:
        (tmp_path / "other").write_bytes(b"weights")
        (tmp_path / "other").replace(file)

    ref = blobs.put_file(write, commit=commit)
    assert ref == blobs.put(b"weights", commit=commit)
    assert blobs.verify(ref).read_bytes() == b"weights"


def test_failing_writer_leaves_no_file(blobs: Blobs) -> None:
    def write(file: Path) -> None:
        file.write_bytes(b"half of i")
        raise BlobError("no room")

    with pytest.raises(BlobError, match="no room"):
        blobs.put_file(write, commit=True)
    assert list(blobs.committed.iterdir()) == []


def test_check_interrupts_the_checksum_of_a_large_file(blobs: Blobs) -> None:
    content, looks = bytes(20 << 20), list[int]()
    ref = blobs.put_file(
        lambda file: file.write_bytes(content), commit=False, check=lambda: looks.append(1)
    )
    assert len(looks) > 7
    for stop in itertools.islice(interrupting_checks(1), 7):
        with pytest.raises(Interrupted):
            blobs.put_file(lambda file: file.write_bytes(content), commit=True, check=stop)
        assert list(blobs.committed.iterdir()) == []
        with pytest.raises(Interrupted):
            blobs.put_leaves(leaves_of(memoryview(content)), commit=True, check=stop)
        assert list(blobs.committed.iterdir()) == []

    with pytest.raises(Interrupted):
        blobs.verify(ref, next(interrupting_checks(1)))


_SECRET = hashlib.shake_256(b"keys of a page").digest(4096)
_KEYS = [int.from_bytes(_SECRET[at : at + 8], "little") | 1 for at in range(0, 4096, 8)]


def sum_page(page: bytes) -> int:
    words = (int.from_bytes(page[at : at + 8], "little") for at in range(0, len(page), 8))
    return sum(key * word for key, word in zip(_KEYS, words, strict=False)) % 2**64


@pytest.mark.parametrize("size", [0, 1, 4097, LEAF_BYTES, LEAF_BYTES + 1])
def test_the_same_bytes_have_the_same_name_however_they_are_written(
    size: int, blobs: Blobs
) -> None:
    content = random.Random(0).randbytes(size)
    written = blobs.put_leaves(leaves_of(memoryview(content)), commit=False)
    assert written.bytes == size
    assert blobs.get(written) == content
    assert blobs.put_file(lambda file: file.write_bytes(content), commit=True) == written
    pages = (content[at : at + 4096] for at in range(0, size, 4096))
    sums = b"".join(sum_page(page).to_bytes(8, "little") for page in pages)
    assert written.digest == hashlib.sha256(sums + size.to_bytes(8, "little")).hexdigest()


def test_leaves_are_asked_for_a_few_ahead(blobs: Blobs) -> None:
    """They may lie in buffers that are used by turns."""
    buffers = [bytearray(LEAF_BYTES) for _ in range(LEAVES_AHEAD + 1)]
    count = 5 * len(buffers)

    def leaves() -> Iterator[Leaf]:
        for number in range(count):
            buffer = buffers[number % len(buffers)]
            buffer[:] = bytes([number]) * LEAF_BYTES
            yield Leaf(number * LEAF_BYTES, partial(memoryview, buffer))

    ref = blobs.put_leaves(leaves(), commit=False)
    with blobs.verify(ref).open("rb") as content:
        for number in range(count):
            assert content.read(LEAF_BYTES) == bytes([number]) * LEAF_BYTES


@pytest.mark.parametrize("cuts", [(0, 1), (4095,), (4096, 4100, 2 * LEAF_BYTES - 3), (LEAF_BYTES,)])
def test_writers_of_a_file_find_its_name_together(
    cuts: tuple[int, ...], blobs: Blobs, tmp_path: Path
) -> None:
    """Two write by turns, from one cut to the next."""
    content = random.Random(2).randbytes(2 * LEAF_BYTES)
    size, file = len(content), tmp_path / "file"
    ends = sorted({0, *cuts, LEAF_BYTES, size})
    parts = [Leaf(begin, partial(memoryview, content[begin:end])) for begin, end in pairwise(ends)]
    file.touch()
    sums = [write_share(file, parts[first::2], size, never_interrupt) for first in (0, 1)]
    assert file.read_bytes() == content
    assert name_sums(sums[0] + sums[1], size) == blobs.put(content, commit=False)


def test_swapped_pages_are_found(blobs: Blobs) -> None:
    pages = [bytes([number]) * 4096 for number in range(3)]
    assert len({blobs.put(b"".join(each), commit=False) for each in permutations(pages)}) == 6


def test_reads_and_copies_what_an_earlier_version_has_named(blobs: Blobs, tmp_path: Path) -> None:
    """Checkpoints and journals name blobs by BLAKE2b of the whole file."""
    content = random.Random(1).randbytes(LEAF_BYTES + 5)
    digest = hashlib.blake2b(content, digest_size=20).hexdigest()
    ref = BlobRef(digest=Digest(digest), bytes=len(content))
    blobs.flight.mkdir()
    (blobs.flight / digest).write_bytes(content)
    assert blobs.get(ref) == content
    assert blobs.verify(ref) == blobs.flight / digest
    assert blobs.commit(ref).name == digest
    blobs.release(ref)
    assert blobs.verify(ref).read_bytes() == content
    flip(blobs.committed / digest, LEAF_BYTES + 2)
    with pytest.raises(BlobLost, match="checksum"):
        blobs.verify(ref)


def flip(file: Path, offset: int) -> None:
    """Change a bit of a file, whose size stays."""
    with file.open("r+b") as content:
        content.seek(offset)
        byte = content.read(1)[0]
        content.seek(offset)
        content.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("offset", [0, LEAF_BYTES - 1, LEAF_BYTES, 3 * LEAF_BYTES])
def test_finds_a_spoiled_bit_of_a_large_blob(offset: int, blobs: Blobs) -> None:
    ref = blobs.put(bytes(3 * LEAF_BYTES + 1), commit=False)
    assert blobs.verify(ref)
    flip(blobs.path(ref), offset)
    with pytest.raises(BlobLost, match="checksum"):
        blobs.verify(ref)


def test_a_host_computes_a_checksum_once(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other engines of the host trust the first one, until the file changes."""
    computed: list[Path] = []

    def compute(file: Path, *arguments: Any) -> BlobRef:
        computed.append(file)
        return digest_file(file, *arguments)

    monkeypatch.setattr(verified_files, "digest_file", compute)
    ref = blobs.put(b"weights", commit=False)
    engines = [Blobs(blobs.flight, blobs.committed) for _ in range(2)]
    path = blobs.path(ref)
    for engine in engines:
        engine.verify(ref)
    assert computed == [path]
    path.write_bytes(b"weights")
    for engine in engines:
        engine.verify(ref)
    assert computed == [path, path]


def test_names_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    blobs = Blobs(tmp_path / "file" / "flight", tmp_path)
    with pytest.raises(BlobError, match="cannot be written: Not a directory"):
        blobs.put(b"x", commit=False)


FULL_DISK = """
import resource, sys
from pathlib import Path
from tlt.blobs import verified_files
from tlt.blobs.blob_digest import LEAF_BYTES, LEAVES_AHEAD, Leaf, digest_file, leaves_of
from tlt.blobs.blob_files import Blobs, remove_unfinished
from tlt.errors import BlobError, BlobLost

blobs = Blobs(Path(sys.argv[1]), Path(sys.argv[1]) / "committed")
flying = blobs.put(bytes(200_000), commit=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
for put in (lambda: blobs.put(b"x" * 200_000, commit=True), lambda: blobs.commit(flying)):
    try:
        put()
    except BlobError as error:
        print(str(error).partition(": ")[2])
assert list(blobs.committed.iterdir()) == []
"""


def test_full_disk_leaves_no_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True
    )
    assert done.stdout == "cannot be written: File too large\n" * 2
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("free", "fits"), [(100, True), (99, False)])
def test_refuses_blobs_that_need_reserved_bytes(
    free: int, fits: bool, blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    careful = Blobs(blobs.flight, blobs.committed, reserved_bytes=lambda: 100)
    monkeypatch.setattr("tlt.blobs.blob_files.free_bytes", lambda folder: free)
    if fits:
        careful.put(b"drafter", commit=False)
        return
    with pytest.raises(BlobError, match="are kept free for policies"):
        careful.put(b"drafter", commit=False)
    assert list(blobs.flight.iterdir()) == []
    # committed blobs are elsewhere, and policies may use the reserved bytes
    careful.put(b"drafter", commit=True)
    blobs.put(b"policy", commit=False)


def test_discards_all_but_the_named_and_what_killed_writers_left(blobs: Blobs) -> None:
    kept, abandoned = (blobs.put(content, commit=True) for content in (b"kept", b"abandoned"))
    flying = blobs.put(b"flying", commit=False)
    (blobs.committed / ".unfinished-x1").write_bytes(b"half")
    (blobs.committed / ".checkpoint-7" / "shard").mkdir(parents=True)
    blobs.discard_all_but({kept})
    assert [path.name for path in blobs.committed.iterdir()] == [kept.digest]
    assert blobs.get(flying) == b"flying"
    with pytest.raises(BlobLost):
        blobs.get(abandoned)


def test_removes_what_a_killed_writer_left_and_nothing_else(blobs: Blobs) -> None:
    """The room that half of a policy takes is free again before the next rank plans with it."""
    write = "Blobs(Path(sys.argv[1]), Path(sys.argv[2])).put_written(begin, commit=False)"
    program = f"""
import os, sys
from pathlib import Path
from tlt.blobs.blob_files import Blobs, remove_unfinished

def begin(file):
    file.write_bytes(b"half")
    os.kill(os.getpid(), 9)

{write}
"""
    subprocess.run([sys.executable, "-c", program, blobs.flight, blobs.committed], check=False)
    assert len(list(blobs.flight.iterdir())) == 1

    def remove_meanwhile(file: Path) -> BlobRef:
        remove_unfinished(blobs.flight)
        assert list(blobs.flight.iterdir()) == [file]
        file.write_bytes(b"whole")
        return digest_file(file, never_interrupt)

    ref = blobs.put_written(remove_meanwhile, commit=False)
    remove_unfinished(blobs.flight)
    assert blobs.get(ref) == b"whole"


def test_discards_nothing_where_no_folder_is(tmp_path: Path) -> None:
    Blobs(tmp_path / "flight", tmp_path / "blobs").discard_all_but(set())
    assert not list(tmp_path.iterdir())


def test_discard_deletes_both_copies(blobs: Blobs) -> None:
    flying, committed, kept = (
        blobs.put(content, commit=commit)
        for content, commit in ((b"flying", False), (b"committed", True), (b"kept", True))
    )
    for ref in (flying, committed, committed):
        blobs.discard(ref)
    assert not list(blobs.flight.iterdir())
    assert [path.name for path in blobs.committed.iterdir()] == [kept.digest]
