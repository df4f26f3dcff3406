"""Wait where a file can't be written because its disk is full, instead of failing.

What is written is repeated whole, so a failed attempt must have left nothing behind.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import structlog

from tlt.errors import BlobError, JournalError, is_out_of_space

_FIRST_SECONDS, _LONGEST_SECONDS = 0.1, 2.0
_Result = TypeVar("_Result")
_log = structlog.get_logger("coordinator")


class DiskWaits:
    """Repeat writes to full disks; `waiting` says what a write waits for now."""

    def __init__(self) -> None:
        self.waiting: str | None = None

    async def retry(self, write: Callable[[], _Result]) -> _Result:
        """Repeat `write` until there is space; any other error is raised."""
        delay = _FIRST_SECONDS
        try:
            while True:
                try:
                    return write()
                except (JournalError, BlobError) as error:
                    if not is_out_of_space(error):
                        raise
                    if self.waiting is None:
                        _log.warning("waiting for space on a disk", error=str(error))
                    self.waiting = str(error)
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LONGEST_SECONDS)
        finally:
            self.waiting = None
