"""A host verifies a file once: a record beside the blobs in flight says which file was intact.

It names the file's inode, size and time of its last change, so a file that was written to or
replaced since is verified again.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from tlt.base.id_types import Digest
from tlt.base.interrupt_check import CheckInterrupt
from tlt.blobs.blob_digest import digest_file
from tlt.errors import BlobLost
from tlt.protocol.refs import BlobRef


class VerifiedFiles:
    def __init__(self, folder: Path) -> None:
        """Keep the records in a folder of this host."""
        self._folder = folder

    def verify(self, file: Path, ref: BlobRef, check: CheckInterrupt) -> Path:
        """Raise BlobLost unless a file is intact; other processes of the host wait meanwhile."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._record(ref.digest).open("a+b") as record:
                fcntl.flock(record, fcntl.LOCK_EX)
                record.seek(0)
                if record.read() != (state := _describe(file)):
                    require(file, ref, digest_file(file, check, ref.digest))
                    self._write(ref, state)
        except OSError as error:
            raise unreadable(file, error) from error
        return file

    def forget(self, digest: Digest) -> None:
        self._record(digest).unlink(missing_ok=True)

    def _write(self, ref: BlobRef, state: bytes) -> None:
        with contextlib.suppress(OSError):  # without room, the next reader verifies it again
            self._record(ref.digest).write_bytes(state)

    def _record(self, digest: Digest) -> Path:
        return self._folder / f".verified-{digest}"


def _describe(file: Path) -> bytes:
    found = os.stat(file)
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}".encode()


def require(path: Path | str, ref: BlobRef, actual: BlobRef) -> BlobRef:
    if actual.bytes != ref.bytes:
        raise BlobLost(f"{path}: {actual.bytes} bytes, {ref.bytes} expected")
    if actual.digest != ref.digest:
        raise BlobLost(f"{path}: its bytes do not have the checksum that is its name")
    return ref


def unreadable(path: Path, error: OSError) -> BlobLost:
    return BlobLost(f"{path}: cannot be read: {error.strerror}")
