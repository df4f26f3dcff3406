"""Exchange messages over a socket pair without ever waiting for the other side.

What doesn't fit the socket's buffer stays here and is sent by a later call, so neither side can
block the other one. A closed socket is not an error here: whoever owns the process notices its end.
"""

import socket
import struct
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 16
Sent = TypeVar("Sent")
Received = TypeVar("Received")


class FrameSocket(Generic[Sent, Received]):
    def __init__(self, end: socket.socket, received: object) -> None:
        """Send messages of any kind, and decode those that arrive as `received`."""
        end.setblocking(False)
        self._socket = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType, reportCallIssue]
        self._outgoing = bytearray()
        self._incoming = bytearray()

    def send(self, message: Sent) -> None:
        body = self._encoder.encode(message)
        self._outgoing += _LENGTH.pack(len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Send what earlier calls couldn't."""
        try:
            while self._outgoing:
                sent = self._socket.send(self._outgoing[:_CHUNK])
                del self._outgoing[:sent]
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()

    def receive(self) -> Sequence[Received]:
        """Return the messages that have arrived."""
        try:
            while chunk := self._socket.recv(_CHUNK):
                self._incoming += chunk
        except OSError:  # nothing more has arrived, or the other side is gone
            pass
        messages: list[Received] = []
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            end = _LENGTH.size + length
            if len(self._incoming) < end:
                break
            messages.append(self._decoder.decode(self._incoming[_LENGTH.size : end]))
            del self._incoming[:end]
        return messages

    def close(self) -> None:
        self._socket.close()
