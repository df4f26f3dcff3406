"""Connect a worker and its rank: length-prefixed messages over a socket pair, and shared counters.

The worker's actor imports this module, so it imports nothing that computes.
"""

import asyncio
import mmap
import select
import socket
import struct
from collections.abc import Generator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TypeVar

import msgspec

from tlt.errors import RankError
from tlt.protocol.commands import CloseJob, OpenJob, StopDrafterTraining, UpdatePolicy
from tlt.protocol.rank_messages import (
    BeginTrajectory,
    ContinueTrajectory,
    DecodePrompts,
    FromRank,
    ToRank,
)

# messages that end a micro-batch in progress
_URGENT = (
    OpenJob,
    CloseJob,
    DecodePrompts,
    BeginTrajectory,
    ContinueTrajectory,
    StopDrafterTraining,
    UpdatePolicy,
)
_LENGTH = struct.Struct("<Q")
_encode = msgspec.msgpack.Encoder().encode
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)
# references to the samples of an update have some sixty bytes each, and tensors are in files
_MOST_BYTES = 1 << 30
_PULSE_SECONDS = 0.5
_Message = TypeVar("_Message")


def pack(message: ToRank | FromRank) -> bytes:
    """Return the message with its length in front."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_from_rank(reader: asyncio.StreamReader) -> FromRank:
    """Return the rank's next message; raise RankError if its socket is closed."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        body = await reader.readexactly(_checked(length))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise RankError("the rank closed its socket") from error
    return _decode(_from_rank, body)


def _checked(length: int) -> int:
    if length > _MOST_BYTES:
        raise RankError(
            f"a message of {length} bytes was announced; they have {_MOST_BYTES} at most"
        )
    return length


def _decode(decoder: msgspec.msgpack.Decoder[_Message], body: bytes | bytearray) -> _Message:
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's own, or text that is not UTF-8
        raise RankError(f"a message cannot be read: {error}") from error


class RankChannel:
    """The rank's end of the socket pair; a computation never waits for it."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._buffer = bytearray()
        self._waiting: list[ToRank] = []

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def send(self, message: FromRank) -> None:
        """Send a message to the worker."""
        self._socket.sendall(pack(message))

    def receive(self, *, wait: float | None) -> list[ToRank]:
        """Return all messages that arrive within `wait` seconds (None: without limit).

        Raise EOFError if the worker has ended.
        """
        self._waiting += self._take_messages()
        while not self._waiting and self._is_readable(wait):
            self._read()
            self._waiting = self._take_messages()
        messages, self._waiting = self._waiting, []
        return messages

    def read_available(self) -> None:
        """Read the messages that have arrived; `receive` returns them later."""
        while self._is_readable(0.0):
            self._read()
        self._waiting += self._take_messages()

    @property
    def has_urgent(self) -> bool:
        """Return True if a message was read that can't wait until a micro-batch is done."""
        return any(isinstance(message, _URGENT) for message in self._waiting)

    def _read(self) -> None:
        try:
            chunk = self._socket.recv(1 << 20)
        except ConnectionError as error:
            # an OSError while a file is being written would be taken for an error of that file
            raise EOFError from error
        if not chunk:
            raise EOFError
        self._buffer += chunk

    def _is_readable(self, wait: float | None) -> bool:
        return bool(select.select([self._socket], [], [], wait)[0])

    def _take_messages(self) -> list[ToRank]:
        messages: list[ToRank] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + _checked(length)
            if len(self._buffer) < end:
                break
            messages.append(_decode(_to_rank, self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return messages


class Progress:
    """Two counters in memory that a rank shares with its worker: work done, requests running."""

    _LAYOUT = struct.Struct("<QQ")
    SIZE = _LAYOUT.size

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, self.SIZE)
        self._done = 0

    def report(self, running: int) -> None:
        """Count one more piece of work."""
        self._done += 1
        self._LAYOUT.pack_into(self._memory, 0, self._done, running)

    @contextmanager
    def report_meanwhile(self) -> Generator[None]:
        """Report twice a second while the body runs, because it can't report its own progress."""
        over = Event()

        def report() -> None:
            while not over.wait(_PULSE_SECONDS):
                self.report(0)

        pulse = Thread(target=report, daemon=True)
        pulse.start()
        try:
            yield
        finally:
            over.set()
            pulse.join()

    def read(self) -> tuple[int, int]:
        """Return the work done and the requests running."""
        done, running = self._LAYOUT.unpack_from(self._memory)
        return done, running
