"""Numbered messages to many listeners, with a short history.

A listener is only the number of the last message that it received, so a slow reader costs nothing
more. It gets the full state again once the history doesn't reach back to its number.
"""

import asyncio
import secrets
from collections import deque

HISTORY = 600
HISTORY_BYTES = 8 << 20


class Broadcast:
    def __init__(self, history: int | None = None) -> None:
        """Remember `history` messages; none are needed where each message is the full state."""
        # Numbers of another broadcast (of this feed before it was closed, or of another process)
        # mean nothing here, so each one has its own name.
        self.name = secrets.token_hex(4)
        self.number = 0
        self._limit = HISTORY if history is None else history
        self._history: deque[bytes] = deque()
        self._history_bytes = 0
        self._wakeups: set[asyncio.Event] = set()

    @property
    def listeners(self) -> int:
        return len(self._wakeups)

    def publish(self, message: bytes) -> None:
        self.number += 1
        self._history.append(message)
        self._history_bytes += len(message)
        while len(self._history) > self._limit or self._history_bytes > HISTORY_BYTES:
            self._history_bytes -= len(self._history.popleft())
        self._wake()

    def after(self, number: int) -> list[bytes] | None:
        """Return the messages after `number`, or None where the history doesn't reach back."""
        missed = self.number - number
        if not 0 <= missed <= len(self._history):
            return None
        return list(self._history)[len(self._history) - missed :]

    def invalidate(self) -> None:
        """Make every listener receive the full state again."""
        self._history.clear()
        self._history_bytes = 0
        self.number += 1
        self._wake()

    def add_listener(self, wakeup: asyncio.Event) -> None:
        self._wakeups.add(wakeup)

    def remove_listener(self, wakeup: asyncio.Event) -> None:
        self._wakeups.discard(wakeup)

    def _wake(self) -> None:
        for wakeup in self._wakeups:
            wakeup.set()
