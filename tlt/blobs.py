"""Content-addressed, checksummed files: a blob's name is the digest of its bytes.

Blobs in flight are in shared memory; committed ones are in the run's folder until they are
discarded. A file appears under its name only when it is complete. The checksum of a large file
takes a while, so it calls `check` often.
"""

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TypeVar

from tlt.errors import BlobError, BlobLost
from tlt.id_types import Digest
from tlt.interrupt_check import CheckInterrupt, never_interrupt
from tlt.protocol.refs import BlobRef

_DIGEST_BYTES = 20
# bytes between two checks
_CHECK_BYTES = 8 << 20

_Read = TypeVar("_Read")


class Blobs:
    def __init__(
        self, flight: Path, committed: Path, *, reserved_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        """`reserved_bytes` stay free in flight, for policies, whatever is put there."""
        self.flight = flight
        self.committed = committed
        self._reserved_bytes = reserved_bytes

    def put(self, data: bytes | bytearray | memoryview, *, commit: bool) -> BlobRef:
        return self.put_file(lambda file: file.write_bytes(data), commit=commit)

    def put_file(
        self,
        write: Callable[[Path], object],
        *,
        commit: bool,
        check: CheckInterrupt = never_interrupt,
    ) -> BlobRef:
        """Store the file that `write` writes to the path that it is given."""
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
        return self._intact(ref, partial(_verified, check=check))

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
            source = self.verify(ref)
            _write(self.committed, lambda file: shutil.copyfile(source, file), durable=True)
        return self.committed / ref.digest

    def share(self, ref: BlobRef, committed: Path) -> None:
        """Commit a blob of another run too: by a link, or by a copy onto another disk."""
        try:
            self.committed.mkdir(parents=True, exist_ok=True)
            os.link(committed / ref.digest, self.committed / ref.digest)
        except OSError:
            Blobs(committed, self.committed).commit(ref)

    def release(self, ref: BlobRef) -> None:
        """Delete the copy in flight."""
        (self.flight / ref.digest).unlink(missing_ok=True)

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


def _ref(file: Path, check: CheckInterrupt, *, durable: bool = False) -> BlobRef:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with file.open("rb", buffering=0) as content:
        if durable:
            os.fsync(content.fileno())
        while part := content.read(_CHECK_BYTES):
            digest.update(part)
            check()
        return BlobRef(digest=Digest(digest.hexdigest()), bytes=content.tell())


def _read(path: Path, ref: BlobRef) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
    _require(path, ref, BlobRef(digest=Digest(digest), bytes=len(data)))
    return data


def _verified(path: Path, ref: BlobRef, check: CheckInterrupt) -> Path:
    try:
        actual = _ref(path, check)
    except OSError as error:
        raise _unreadable(path, error) from error
    _require(path, ref, actual)
    return path


def _require(path: Path, ref: BlobRef, actual: BlobRef) -> None:
    if actual.bytes != ref.bytes:
        raise BlobLost(f"{path}: {actual.bytes} bytes, {ref.bytes} expected")
    if actual.digest != ref.digest:
        raise BlobLost(f"{path}: its bytes do not have the checksum that is its name")


def _unreadable(path: Path, error: OSError) -> BlobLost:
    return BlobLost(f"{path}: cannot be read: {error.strerror}")


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
    write: Callable[[Path], object],
    *,
    durable: bool,
    reserved_bytes: int = 0,
    check: CheckInterrupt = never_interrupt,
) -> BlobRef:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".unfinished-")
        os.close(handle)
        unfinished = Path(name)
        try:
            _require_room(folder, reserved_bytes)
            write(unfinished)  # may replace the file by another
            _require_room(folder, reserved_bytes)
            check()
            ref = _ref(unfinished, check, durable=durable)
            unfinished.replace(folder / ref.digest)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise BlobError(f"{folder}: cannot be written: {error.strerror}") from error
    return ref
