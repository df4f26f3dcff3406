"""Exchange bytes among all ranks of an update; a rank that is lost fails the collective for all.

The first rank of a job's first worker serves it, as it does for torch.distributed.
"""

import selectors
import socket
import threading
from collections.abc import Sequence

import msgspec


class _Part(msgspec.Struct):
    """Hold what one rank gives to a collective."""

    group: str
    rank: int
    world: int
    data: bytes


class _Server:
    """Collect the parts of each group, and send all of them to each rank."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._received: dict[socket.socket, bytearray] = {}
        self._waiting: dict[str, dict[int, tuple[socket.socket, bytes]]] = {}
        self._broken: set[str] = set()

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._received:
                    self._read(key.fileobj)

    def _accept(self) -> None:
        peer, _ = self._listener.accept()
        self._received[peer] = bytearray()
        self._selector.register(peer, selectors.EVENT_READ)

    def _read(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self._lose(peer)
            return
        received = self._received[peer]
        received += data
        if received.endswith(b"\n"):
            self._take(peer, msgspec.json.decode(received, type=_Part))

    def _take(self, peer: socket.socket, part: _Part) -> None:
        waiting = self._waiting.setdefault(part.group, {})
        # a second rank in the same place, or a group that failed, is an error of the sender
        if part.rank in waiting or part.group in self._broken:
            self._break(part.group)
            self._close(peer)
            return
        waiting[part.rank] = peer, part.data
        if len(waiting) == part.world:
            reply = msgspec.json.encode([waiting[rank][1] for rank in range(part.world)]) + b"\n"
            for other, _ in self._waiting.pop(part.group).values():
                other.sendall(reply)
                self._close(other)

    def _lose(self, peer: socket.socket) -> None:
        for group, waiting in list(self._waiting.items()):
            if any(other is peer for other, _ in waiting.values()):
                self._break(group)
        self._close(peer)

    def _break(self, group: str) -> None:
        self._broken.add(group)
        for other, _ in self._waiting.pop(group, {}).values():
            self._close(other)

    def _close(self, peer: socket.socket) -> None:
        if self._received.pop(peer, None) is not None:
            self._selector.unregister(peer)
            peer.close()


def serve(host: str) -> str:
    """Serve collectives as long as this process runs, and return the address."""
    listener = socket.create_server((host, 0))
    threading.Thread(target=_Server(listener).run, daemon=True).start()
    return f"{host}:{listener.getsockname()[1]}"


class Collective:
    """A group of ranks that meet at an address."""

    def __init__(self, address: str, group: str, rank: int, world: int, seconds: float) -> None:
        self.rank = rank
        self._address = address
        self._group = group
        self._world = world
        self._seconds = seconds
        self._number = 0

    def gather(self, data: bytes) -> Sequence[bytes]:
        """Return what all ranks give, in their order; raise OSError if one of them is lost."""
        host, _, port = self._address.rpartition(":")
        self._number += 1
        part = _Part(f"{self._group}/{self._number}", self.rank, self._world, data)
        with socket.create_connection((host, int(port)), self._seconds) as peer:
            peer.sendall(msgspec.json.encode(part) + b"\n")
            with peer.makefile("rb") as reply:
                line = reply.readline()
        if not line:
            raise ConnectionError(f"a rank of {self._group} was lost")
        return msgspec.json.decode(line, type=list[bytes])
