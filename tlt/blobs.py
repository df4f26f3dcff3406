"""Content-addressed, checksummed files: a blob's name is the digest of its bytes.

In flight they lie in shared memory; committed ones lie in the run's folder and stay.
A file appears under its name only when it is whole.
"""

import hashlib
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tlt.errors import BlobError, BlobLost
from tlt.messages import BlobRef, Tensor
from tlt.types import Digest

INLINE_BYTES = 64 * 1024


class Blobs:
    def __init__(self, flight: Path, committed: Path) -> None:
        self.flight = flight
        self.committed = committed

    def put(self, data: bytes | bytearray | memoryview, *, commit: bool) -> BlobRef:
        ref = BlobRef(
            digest=Digest(hashlib.blake2b(data, digest_size=20).hexdigest()),
            bytes=memoryview(data).nbytes,
        )
        _write(self.committed if commit else self.flight, ref, data, durable=commit)
        return ref

    def path(self, ref: BlobRef) -> Path:
        for folder in (self.flight, self.committed):
            path = folder / ref.digest
            if path.exists():
                return path
        raise BlobLost(f"blob {ref.digest} is neither in {self.flight} nor in {self.committed}")

    def get(self, ref: BlobRef) -> bytes:
        path = self.path(ref)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BlobLost(f"{path}: cannot be read: {error.strerror}") from error
        if len(data) != ref.bytes:
            raise BlobLost(f"{path}: {len(data)} bytes, {ref.bytes} expected")
        if hashlib.blake2b(data, digest_size=20).hexdigest() != ref.digest:
            raise BlobLost(f"{path}: its bytes do not have the checksum that is its name")
        return data

    def commit(self, ref: BlobRef) -> Path:
        """Make a blob in flight one that stays."""
        if not (self.committed / ref.digest).exists():
            _write(self.committed, ref, self.get(ref), durable=True)
        return self.committed / ref.digest

    def release(self, ref: BlobRef) -> None:
        """Let go of the copy in flight."""
        (self.flight / ref.digest).unlink(missing_ok=True)

    def pack(self, array: "np.ndarray[Any, Any]") -> Tensor:
        data = np.ascontiguousarray(array).tobytes()
        inline = len(data) <= INLINE_BYTES
        return Tensor(
            dtype=array.dtype.name,
            shape=array.shape,
            data=data if inline else None,
            blob=None if inline else self.put(data, commit=False),
        )

    def unpack(self, tensor: Tensor) -> "np.ndarray[Any, Any]":
        if tensor.data is not None:
            data = tensor.data
        elif tensor.blob is not None:
            data = self.get(tensor.blob)
        else:
            raise BlobError("a tensor with neither bytes nor a blob")
        dtype = np.dtype(tensor.dtype)
        if len(data) != math.prod(tensor.shape) * dtype.itemsize:
            raise BlobError(f"{len(data)} bytes are no {tensor.dtype} of shape {tensor.shape}")
        return np.frombuffer(data, dtype=dtype).reshape(tensor.shape)


def _write(
    folder: Path, ref: BlobRef, data: bytes | bytearray | memoryview, *, durable: bool
) -> None:
    path = folder / ref.digest
    if path.exists():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".unfinished-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise BlobError(f"{path}: cannot be written: {error.strerror}") from error
