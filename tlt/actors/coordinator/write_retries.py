"""Wait where a disk is full or a store of blobs doesn't answer, instead of failing.

What is written is repeated whole, so a failed attempt must have left nothing behind.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from tlt.errors import BlobError, JournalError, find_remedy

_FIRST_SECONDS, _LONGEST_SECONDS = 0.1, 2.0
_Result = TypeVar("_Result")
_log = structlog.get_logger("coordinator")


class DiskWaits:
    """Repeat writes that fail for now; `waiting` says what a write waits for."""

    def __init__(self) -> None:
        self.waiting: str | None = None

    async def retry(self, write: Callable[[], Awaitable[_Result]]) -> _Result:
        """Repeat `write` until it succeeds; an error that doesn't pass by itself is raised."""
        delay = _FIRST_SECONDS
        try:
            while True:
                try:
                    return await write()
                except (JournalError, BlobError) as error:
                    if find_remedy(error) is None:
                        raise
                    if self.waiting is None:
                        _log.warning("waiting to write", error=str(error))
                    self.waiting = str(error)
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LONGEST_SECONDS)
        finally:
            self.waiting = None
