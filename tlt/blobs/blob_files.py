"""Content-addressed, checksummed files: a blob's name is the digest of its bytes.

Blobs in flight are in shared memory; committed ones are in the run's folder until they are
discarded, or in a folder or store that a file in the run's folder names. A file appears under its
name only when it is complete. The checksum of a large file takes a while, so it calls `check`
often; a host computes it once, for all who read the file.
"""

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Generator, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

from tlt.base.interrupt_check import CheckInterrupt, never_interrupt
from tlt.blobs.blob_digest import Leaf, digest_bytes, digest_file, leaves_of, write_leaves
from tlt.blobs.blob_url_store import BlobStore, local_folder
from tlt.blobs.verified_files import VerifiedFiles, require, unreadable
from tlt.errors import BlobError, BlobLost
from tlt.protocol.refs import BlobRef

# names of files that a process is writing begin so, with its id
_UNFINISHED = ".unfinished-"
# in a run's folder: the URL of its committed blobs, if they aren't in that folder
_URL_FILE = "blobs-url"

_Read = TypeVar("_Read")


def place_blobs(run: Path, url: str) -> None:
    """Have the committed blobs of a new run at this URL."""
    with open(run / _URL_FILE, "w") as file:
        file.write(url + "\n")
        file.flush()
        os.fsync(file.fileno())


def blobs_of_run(
    run: Path, flight: Path, *, reserved_bytes: Callable[[], int] = lambda: 0
) -> "Blobs":
    try:
        url = (run / _URL_FILE).read_text().strip()
    except FileNotFoundError:
        return Blobs(flight, run / "blobs", reserved_bytes=reserved_bytes)
    except OSError as error:
        raise unreadable(run / _URL_FILE, error) from error
    if (folder := local_folder(url)) is not None:
        return Blobs(flight, folder, reserved_bytes=reserved_bytes)
    return StoredBlobs(flight, BlobStore(url), reserved_bytes=reserved_bytes)


@contextlib.contextmanager
def committed_blobs(run: Path) -> Generator["Blobs"]:
    """Yield a run's blobs to a process outside of its session; copies of a store's are deleted."""
    with tempfile.TemporaryDirectory(prefix="tlt-blobs-") as flight:
        yield blobs_of_run(run, Path(flight))


@contextlib.contextmanager
def fetch_alone(flight: Path, ref: BlobRef) -> Generator[None]:
    """Hold the host's lock on fetching a blob."""
    flight.mkdir(parents=True, exist_ok=True)
    with open(flight / f".fetch-{ref.digest}", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Blobs:
    def __init__(
        self, flight: Path, committed: Path, *, reserved_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        """`reserved_bytes` stay free in flight, for policies, whatever is put there."""
        self.flight = flight
        self.committed = committed
        self._reserved_bytes = reserved_bytes
        self._verified = VerifiedFiles(flight)

    def put(self, data: bytes | bytearray | memoryview, *, commit: bool) -> BlobRef:
        return self.put_leaves(leaves_of(memoryview(data).cast("B")), commit=commit)

    def put_leaves(
        self,
        leaves: Iterable[Leaf],
        *,
        commit: bool,
        check: CheckInterrupt = never_interrupt,
    ) -> BlobRef:
        """Store leaves, of which several threads make, hash and write some at a time."""
        return self._put(lambda file: write_leaves(file, leaves, check), commit, check)

    def put_written(self, write: Callable[[Path], BlobRef], *, commit: bool) -> BlobRef:
        """Store the file that `write` writes to the path that it is given, and names."""
        return self._put(write, commit, never_interrupt)

    def put_file(
        self,
        write: Callable[[Path], object],
        *,
        commit: bool,
        check: CheckInterrupt = never_interrupt,
    ) -> BlobRef:
        """Store the file that `write` writes to the path that it is given."""

        def write_and_read(file: Path) -> BlobRef:
            write(file)  # may replace the file by another
            check()
            return digest_file(file, check)

        return self._put(write_and_read, commit, check)

    def _put(
        self, write: Callable[[Path], BlobRef], commit: bool, check: CheckInterrupt
    ) -> BlobRef:
        if commit:
            return _write(self.committed, write, durable=True, check=check)
        return _write(
            self.flight, write, durable=False, reserved_bytes=self._reserved_bytes(), check=check
        )

    def has(self, ref: BlobRef) -> bool:
        return any((folder / ref.digest).exists() for folder in (self.flight, self.committed))

    def path(self, ref: BlobRef) -> Path:
        for folder in (self.flight, self.committed):
            path = folder / ref.digest
            if path.exists():
                return path
        raise BlobLost(f"blob {ref.digest} is neither in {self.flight} nor in {self.committed}")

    def get(self, ref: BlobRef) -> bytes:
        return self._intact(ref, _read)

    def verify(self, ref: BlobRef, check: CheckInterrupt = never_interrupt) -> Path:
        """Return the path of an intact file, for large blobs that are mapped instead of read."""
        return self._intact(ref, partial(self._verified.verify, check=check))

    def _intact(self, ref: BlobRef, read: Callable[[Path, BlobRef], _Read]) -> _Read:
        """Read the committed copy if the one in flight is damaged."""
        try:
            return read(self.path(ref), ref)
        except BlobLost:
            committed = self.committed / ref.digest
            if not committed.exists():
                raise
            return read(committed, ref)

    def commit(self, ref: BlobRef) -> Path:
        """Copy a blob in flight to the run's folder."""
        if not (self.committed / ref.digest).exists():
            _copy(self.verify(ref), ref, self.committed)
        return self.committed / ref.digest

    def share(self, ref: BlobRef, other: "Blobs") -> None:
        """Commit a blob of another run too: by a link, or by a copy onto another disk."""
        try:
            self.committed.mkdir(parents=True, exist_ok=True)
            os.link(other.committed / ref.digest, self.committed / ref.digest)
        except OSError:
            _copy(other.verify(ref), ref, self.committed)

    def release(self, ref: BlobRef) -> None:
        """Delete the copy in flight."""
        (self.flight / ref.digest).unlink(missing_ok=True)
        self._verified.forget(ref.digest)

    def discard(self, ref: BlobRef) -> None:
        self.release(ref)
        (self.committed / ref.digest).unlink(missing_ok=True)

    def discard_all_but(self, refs: Collection[BlobRef]) -> None:
        """Delete all other committed blobs, and what writers that were killed had begun."""
        kept = {ref.digest for ref in refs}
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.committed):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                elif entry.name not in kept:
                    Path(entry.path).unlink(missing_ok=True)

    def committed_names(self) -> set[str]:
        try:
            return {entry.name for entry in os.scandir(self.committed)}
        except OSError:
            return set()

    def read_committed(self, ref: BlobRef, offset: int, size: int) -> bytes:
        """Read a part of a committed blob, without its checksum."""
        path = self.committed / ref.digest
        try:
            with path.open("rb") as content:
                content.seek(offset)
                return content.read(size)
        except OSError as error:
            raise unreadable(path, error) from error

    def check_place(self) -> None:
        """Raise StoreUnreachable if the store of committed blobs doesn't answer."""


class StoredBlobs(Blobs):
    """Blobs that are committed to a store: written and read by way of the folder in flight.

    The copy in flight is kept for other readers until it is released.
    """

    def __init__(
        self, flight: Path, store: BlobStore, *, reserved_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        super().__init__(flight, flight, reserved_bytes=reserved_bytes)
        self.store = store

    def _put(
        self, write: Callable[[Path], BlobRef], commit: bool, check: CheckInterrupt
    ) -> BlobRef:
        ref = super()._put(write, False, check)
        if commit:
            self.store.put(self.flight / ref.digest, ref)
        return ref

    def path(self, ref: BlobRef) -> Path:
        """Return the path of the copy in flight, which is downloaded if there is none."""
        path = self.flight / ref.digest
        return path if path.exists() else self._download(ref)

    def verify(self, ref: BlobRef, check: CheckInterrupt = never_interrupt) -> Path:
        if not (self.flight / ref.digest).exists():
            return self._download(ref)  # its checksum is verified there
        return super().verify(ref, check)

    def _intact(self, ref: BlobRef, read: Callable[[Path, BlobRef], _Read]) -> _Read:
        try:
            return read(self.path(ref), ref)
        except BlobLost:
            self.release(ref)
            return read(self._download(ref), ref)

    def _download(self, ref: BlobRef) -> Path:
        path = self.flight / ref.digest
        with fetch_alone(self.flight, ref):
            if path.exists():  # another process of this host has fetched it
                return path
            _write(self.flight, partial(self._get, ref), durable=False)
        return path

    def _get(self, ref: BlobRef, file: Path) -> BlobRef:
        self.store.get(ref, file)
        found = digest_file(file, never_interrupt, ref.digest)
        return require(f"{self.store.url}/{ref.digest}", ref, found)

    def commit(self, ref: BlobRef) -> Path:
        """Upload a blob in flight."""
        path = self.flight / ref.digest
        if not self.store.has(ref):
            if not path.exists():
                raise BlobLost(f"blob {ref.digest} is neither in {self.flight} nor in the store")
            path = self.verify(ref)
            self.store.put(path, ref)
        return path

    def share(self, ref: BlobRef, other: Blobs) -> None:
        """Commit a blob of another run too: the store copies its own."""
        if isinstance(other, StoredBlobs) and self.store.copy(ref, other.store):
            return
        self.store.put(other.verify(ref), ref)

    def discard(self, ref: BlobRef) -> None:
        self.release(ref)
        self.store.delete([ref.digest])

    def discard_all_but(self, refs: Collection[BlobRef]) -> None:
        self.store.delete(self.store.names() - {ref.digest for ref in refs})

    def committed_names(self) -> set[str]:
        return self.store.names()

    def read_committed(self, ref: BlobRef, offset: int, size: int) -> bytes:
        return self.store.read_part(ref, offset, size)

    def check_place(self) -> None:
        self.store.check()


def _read(path: Path, ref: BlobRef) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    require(path, ref, BlobRef(digest=digest_bytes(data, ref.digest), bytes=len(data)))
    return data


def _copy(source: Path, ref: BlobRef, folder: Path) -> None:
    def copy(file: Path) -> BlobRef:
        shutil.copyfile(source, file)
        return require(file, ref, digest_file(file, never_interrupt, ref.digest))

    _write(folder, copy, durable=True)


def remove_unfinished(flight: Path) -> None:
    """Delete what killed processes of this host had begun to write."""
    for file in flight.glob(f"{_UNFINISHED}*-*"):
        writer = file.name.removeprefix(_UNFINISHED).partition("-")[0]
        if not Path("/proc", writer).exists():
            file.unlink(missing_ok=True)


def free_bytes(folder: Path) -> int:
    store = os.statvfs(folder)
    if store.f_blocks == 0:  # a tmpfs without a limit
        return sys.maxsize
    return store.f_bavail * store.f_frsize


def _require_room(folder: Path, reserved_bytes: int) -> None:
    if reserved_bytes and (remaining := free_bytes(folder)) < reserved_bytes:
        raise BlobError(
            f"{folder}: cannot be written: it would leave {remaining >> 20} MB, "
            f"and {reserved_bytes >> 20} MB are kept free for policies"
        )


def _write(
    folder: Path,
    write: Callable[[Path], BlobRef],
    *,
    durable: bool,
    reserved_bytes: int = 0,
    check: CheckInterrupt = never_interrupt,
) -> BlobRef:
    """Give a file its name once it is complete, and if `durable` on the disk."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=f"{_UNFINISHED}{os.getpid()}-")
        os.close(handle)
        unfinished = Path(name)
        try:
            _require_room(folder, reserved_bytes)
            ref = write(unfinished)
            _require_room(folder, reserved_bytes)
            check()
            if durable:
                _sync(unfinished)
            unfinished.replace(folder / ref.digest)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise BlobError(f"{folder}: cannot be written: {error.strerror}") from error
    return ref


def _sync(file: Path) -> None:
    with file.open("rb") as content:
        os.fsync(content.fileno())
