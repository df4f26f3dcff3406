"""Let an agent reach its worker's endpoint on a loopback address of its own.

The endpoint listens on a Unix socket, which a process without a network can open. The address
exists for the agent's process alone where it has a network namespace.
"""

import asyncio
import contextlib
import fcntl
import socket
import struct
import threading
from concurrent.futures import Future

_PART = 1 << 16
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


class LoopbackForwarder:
    def __init__(self, path: str) -> None:
        """Forward connections to a Unix socket until the process ends."""
        self._socket = path
        _start_loopback()
        port: Future[int] = Future()
        threading.Thread(target=lambda: asyncio.run(self._serve(port)), daemon=True).start()
        self.port = port.result()

    async def _serve(self, port: Future[int]) -> None:
        try:
            server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        except OSError as error:
            port.set_exception(error)
            return
        port.set_result(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, asks = await asyncio.open_unix_connection(self._socket)
        except OSError:  # the worker has ended, and soon this process will
            writer.close()
            return
        await asyncio.gather(_copy(reader, asks), _copy(answers, writer))


def _start_loopback() -> None:
    """Start the loopback device, which is down in a new network namespace."""
    with contextlib.suppress(OSError), socket.socket() as any_socket:
        asked = struct.pack("16sh22x", b"lo", 0)
        _, flags = struct.unpack("16sh22x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, asked))
        if not flags & _IFF_UP:
            started = struct.pack("16sh22x", b"lo", flags | _IFF_UP)
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, started)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Pass bytes on until one end closes."""
    try:
        while part := await source.read(_PART):
            target.write(part)
            await target.drain()
    except ConnectionError:
        pass
    finally:
        target.close()
