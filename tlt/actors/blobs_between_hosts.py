"""Blobs in flight lie on the host that wrote them; other hosts fetch them through Ray.

Workers serve the blobs of their host. A host fetches a blob once, for all of its ranks. Nothing
is fetched that lies in the run's folder, which all hosts see. What no host has any more is left
to its reader, who finds it in the store of committed blobs, or lost as on one host.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
import ray.exceptions
import structlog

from tlt.base.id_types import Digest, JobId, WorkerId
from tlt.blobs.blob_files import Blobs, StoredBlobs, blobs_of_run, fetch_alone
from tlt.blobs.verified_files import VerifiedFiles
from tlt.errors import BlobError
from tlt.protocol.refs import BlobRef, MinibatchShare
from tlt.spec.config import HIDDEN_STATES, SessionSpec

_PART_BYTES = 16 << 20
# parts on their way at once
_PARTS_AHEAD = 3
_ASK_SECONDS = 5.0
_PART_SECONDS = 30.0
_RAY_ERRORS = (ray.exceptions.RayError, ValueError, TimeoutError)
_log = structlog.get_logger("blobs")


def referenced_blobs(message: object) -> Iterator[BlobRef]:
    """Yield the blobs that a message names, wherever it does."""
    match message:
        case BlobRef():
            yield message
        case MinibatchShare():
            pass  # of its thousands of references none is a blob's
        case msgspec.Struct():
            for name in message.__struct_fields__:
                yield from referenced_blobs(getattr(message, name))
        case dict():
            for value in message.values():  # pyright: ignore[reportUnknownVariableType]
                yield from referenced_blobs(value)  # pyright: ignore[reportUnknownArgumentType]
        case tuple():
            for value in message:  # pyright: ignore[reportUnknownVariableType]
                yield from referenced_blobs(value)  # pyright: ignore[reportUnknownArgumentType]
        case _:
            pass


def blob_file(spec: SessionSpec, job: JobId, digest: Digest) -> Path:
    """Return the path of a blob in flight; other hosts name it."""
    if not digest.isalnum():
        raise BlobError(f"{digest!r} is no digest")
    return _job_folder(spec, job) / digest


def release_blob(spec: SessionSpec, job: JobId, digest: Digest) -> None:
    """Delete a blob in flight on this host."""
    file = blob_file(spec, job, digest)
    file.unlink(missing_ok=True)
    VerifiedFiles(file.parent).forget(digest)


def remove_job_folder(spec: SessionSpec, job: JobId, *, only_states: bool = False) -> None:
    """Remove what a job has in shared memory on this host, or only its hidden states."""
    folder = _job_folder(spec, job)
    shutil.rmtree(folder / HIDDEN_STATES if only_states else folder, ignore_errors=True)


def _job_folder(spec: SessionSpec, job: JobId) -> Path:
    folder = spec.job_flight(job)
    if folder.parent != Path(spec.flight) or job in (".", ".."):
        raise BlobError(f"{job!r} is no job")
    return folder


def read_part(file: Path, offset: int, size: int) -> bytes:
    """Return at most `size` bytes of a blob."""
    with open(file, "rb") as content:
        content.seek(offset)
        return content.read(size)


class BlobTransfer:
    """Fetch blobs that this host lacks, and release them on all hosts."""

    def __init__(self, spec: SessionSpec, own: WorkerId | None) -> None:
        """`own` is the worker that fetches, None in the coordinator."""
        self._spec = spec
        self._own = own
        # a handle outlasts the actor's restarts
        self._workers: dict[str, Any] = {}

    async def fetch(self, job: JobId, run: Path, refs: Iterable[BlobRef]) -> None:
        """Fetch the blobs that are neither in flight here nor in the run's folder."""
        if self._spec.cluster is None:
            return
        blobs = blobs_of_run(run, self._spec.job_flight(job))
        if lacking := [ref for ref in dict.fromkeys(refs) if not blobs.has(ref)]:
            await asyncio.to_thread(self._fetch_all, job, blobs, lacking)

    def release(self, job: JobId, run: Path, refs: Sequence[BlobRef]) -> None:
        """Delete blobs in flight on all hosts; one that can't be reached keeps them for a while."""
        blobs = blobs_of_run(run, self._spec.job_flight(job))
        for ref in refs:
            blobs.release(ref)
        if self._spec.cluster is not None:
            for worker in self._others():
                worker.release_blobs.remote(job, [ref.digest for ref in refs])

    def forget(self, job: JobId, *, only_states: bool = False) -> None:
        """Remove what a job has in shared memory, on all hosts: it has ended, or is paused."""
        remove_job_folder(self._spec, job, only_states=only_states)
        if self._spec.cluster is not None:
            for worker in self._others():
                worker.remove_job_folder.remote(job, only_states)

    def _fetch_all(self, job: JobId, blobs: Blobs, refs: Sequence[BlobRef]) -> None:
        for ref in refs:
            with fetch_alone(blobs.flight, ref):
                # another worker of this host may have fetched it
                fetched = blobs.has(ref) or self._fetch(job, blobs, ref)
                if not fetched and not isinstance(blobs, StoredBlobs):
                    _log.warning("no host has this blob", job=job, blob=ref.digest)

    def _fetch(self, job: JobId, blobs: Blobs, ref: BlobRef) -> bool:
        for worker in self._holders(job, ref):
            began = time.monotonic()
            try:
                fetched = blobs.put_file(
                    lambda file, worker=worker: _copy(worker, job, ref, file), commit=False
                )
            except (*_RAY_ERRORS, BlobError) as error:
                _log.warning("blob not fetched", job=job, blob=ref.digest, error=str(error))
                continue
            if fetched == ref:
                seconds = round(time.monotonic() - began, 3)
                _log.info(
                    "blob fetched", job=job, blob=ref.digest, bytes=ref.bytes, seconds=seconds
                )
                return True
            blobs.release(fetched)
        return False

    def _holders(self, job: JobId, ref: BlobRef) -> Iterator[Any]:
        """Yield workers whose host has a blob; those that can't be reached are passed over."""
        asked = {worker.has_blob.remote(job, ref.digest): worker for worker in self._others()}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ASK_SECONDS)
        for answer in done:
            with contextlib.suppress(*_RAY_ERRORS):
                if ray.get(answer):
                    yield asked[answer]

    def _others(self) -> Iterator[Any]:
        for index in range(self._spec.workers):
            name = f"w{index}"
            if name == self._own:
                continue
            with contextlib.suppress(ValueError):  # it hasn't been started
                if name not in self._workers:
                    self._workers[name] = ray.get_actor(name)
                yield self._workers[name]


def _copy(worker: Any, job: JobId, ref: BlobRef, file: Path) -> None:
    """Write a blob of another host to a file, a few parts ahead of what is written."""
    offsets = range(0, ref.bytes, _PART_BYTES)
    coming: list[Any] = []
    with open(file, "wb") as content:
        for offset in offsets:
            coming.append(worker.read_blob.remote(job, ref.digest, offset, _PART_BYTES))
            if len(coming) == _PARTS_AHEAD:
                content.write(ray.get(coming.pop(0), timeout=_PART_SECONDS))
        for part in coming:
            content.write(ray.get(part, timeout=_PART_SECONDS))
