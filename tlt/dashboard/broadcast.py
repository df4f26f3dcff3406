"""What listeners are told: numbered messages and a short past of them.

A listener is a number, of the last message that it was sent; whoever reads slowly costs one number
and is told the whole again once the past does not reach back to it.
"""

import asyncio
import secrets
from collections import deque

_PAST = 600
_PAST_BYTES = 8 << 20


class Channel:
    """`past`: how many messages are remembered; none where each of them is the whole."""

    def __init__(self, past: int | None = None) -> None:
        # numbers of another channel, of this feed before it was closed or of another process, say
        # nothing of this one's
        self.name = secrets.token_hex(4)
        self.number = 0
        self.listeners = 0
        self._most = _PAST if past is None else past
        self._past: deque[bytes] = deque()
        self._bytes = 0
        self._bells: set[asyncio.Event] = set()

    def publish(self, message: bytes) -> None:
        self.number += 1
        self._past.append(message)
        self._bytes += len(message)
        while len(self._past) > self._most or self._bytes > _PAST_BYTES:
            self._bytes -= len(self._past.popleft())
        self.ring()

    def ring(self) -> None:
        for bell in self._bells:
            bell.set()

    def since(self, number: int) -> list[bytes] | None:
        """None where the past does not reach back so far, or never was there."""
        missed = self.number - number
        if not 0 <= missed <= len(self._past):
            return None
        return list(self._past)[len(self._past) - missed :]

    def forget(self) -> None:
        """Everybody is told the whole again."""
        self._past.clear()
        self._bytes = 0
        self.number += 1
        self.ring()

    def listen(self, bell: asyncio.Event) -> None:
        self.listeners += 1
        self._bells.add(bell)

    def leave(self, bell: asyncio.Event) -> None:
        self.listeners -= 1
        self._bells.discard(bell)
