"""Commit and delete blobs one after the other, in a thread.

A long upload leaves the event loop free. What is deleted is not committed again meanwhile.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from tlt.actors.coordinator.redis_effects import Caused
from tlt.blobs.blob_files import Blobs
from tlt.errors import BlobError
from tlt.protocol.commands import CommitBestPolicy, CommitDrafter
from tlt.protocol.events import DrafterCommitFailed
from tlt.protocol.refs import BlobRef

Commit = CommitBestPolicy | CommitDrafter
_log = structlog.get_logger("coordinator")


class BlobCommits:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blobs")

    async def commit(self, blobs: Blobs, caused: Sequence[Caused]) -> list[DrafterCommitFailed]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, commit_blobs, blobs, caused)

    def discard(self, blobs: Blobs, refs: Sequence[BlobRef]) -> None:
        def delete() -> None:
            for ref in refs:
                blobs.discard(ref)

        self._thread.submit(_attempt, delete)

    def discard_all_but(self, blobs: Blobs, refs: Collection[BlobRef]) -> None:
        self._thread.submit(_attempt, lambda: blobs.discard_all_but(refs))


def _attempt(delete: Callable[[], None]) -> None:
    """Delete; what a store that doesn't answer keeps is deleted when its job ends."""
    try:
        delete()
    except (BlobError, OSError) as error:
        _log.warning("blobs not deleted", error=str(error))


def commit_blobs(blobs: Blobs, caused: Sequence[Caused]) -> list[DrafterCommitFailed]:
    """Commit the blobs that commands name.

    Return drafters that are lost, don't fit on the disk or can't be uploaded now: without them a
    job is slower, not wrong.
    """
    failures: list[DrafterCommitFailed] = []
    for command, _, _ in caused:
        match command:
            case CommitBestPolicy():
                for blob in command.policy.blobs:
                    blobs.commit(blob)
            case CommitDrafter():
                try:
                    blobs.commit(command.drafter.weights)
                except BlobError as error:
                    _log.warning("drafter not committed", job=command.job, error=str(error))
                    version = command.drafter.version
                    failures.append(
                        DrafterCommitFailed(job=command.job, version=version, error=str(error))
                    )
            case _:
                pass
    return failures
