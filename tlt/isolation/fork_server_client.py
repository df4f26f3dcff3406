"""Start the process that loads a spec's code and forks those that run it, with a scratch folder."""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tlt.base.child_process import die_with_parent, last_line
from tlt.errors import ConfigError
from tlt.isolation.fork_messages import LENGTH, NO_CHILD, Limits, Start, Started, framed
from tlt.isolation.limits import remove_folder

_SCRATCH_PREFIX = "tlt-own-code-"
# a younger one may not be locked yet
_YOUNG_SECONDS = 60.0


class ScratchFolder:
    def __init__(self) -> None:
        _remove_leftovers(Path(tempfile.gettempdir()), time.time())
        self.path = tempfile.mkdtemp(prefix=_SCRATCH_PREFIX)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        remove_folder(self.path)
        os.close(self._lock)


def _remove_leftovers(parent: Path, now: float) -> None:
    for folder in parent.glob(f"{_SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.stat()
            if found.st_uid != os.getuid() or now - found.st_mtime < _YOUNG_SECONDS:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folder(folder)
            finally:
                os.close(lock)


_START_SECONDS = 60.0
_started = msgspec.json.Decoder(Started)


@dataclass(frozen=True)
class Child:
    """A process that answers one request after the other."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    # what kills it: a handle, and its group where it has no namespace
    handle: int
    group: int

    async def ask(self, request: msgspec.Struct) -> bytes:
        """Raise ConnectionError or IncompleteReadError if it ends before it answers."""
        self.writer.write(framed(request))
        await self.writer.drain()
        (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        return await self.reader.readexactly(length)

    def kill(self) -> None:
        """End it and all that it has started."""
        self.writer.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        os.close(self.handle)
        if self.group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGKILL)


class ForkServer:
    """A process that ends with the thread that starts it: a long-lived one."""

    def __init__(self, module: str, what: str, limits: Limits, code: msgspec.Struct, log: Path):
        """Run `module`; complaints name `what` it runs, which the section `code` of a spec says."""
        self.started = Started()
        self._module = module
        self._what = what
        self._limits = limits
        self._code = msgspec.Raw(msgspec.json.encode(code))
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._folder: ScratchFolder | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Start it unless it runs; raise ConfigError if the code can't be loaded."""
        async with self._lock:
            await self._start()

    async def fork(self) -> Child:
        """Start it if need be, and again if it is ending; raise OSError if there is no process."""
        async with self._lock:
            try:
                message, handles = await self._fork()
            except ConnectionError:
                self.stop()
                message, handles = await self._fork()
        link = socket.socket(fileno=handles[0])
        reader, writer = await asyncio.open_unix_connection(sock=link)
        return Child(reader, writer, handles[1], LENGTH.unpack(message)[0])

    async def _fork(self) -> tuple[bytes, list[int]]:
        control = await self._start()
        await _send(control, b"f")
        await _readable(control)
        message, handles, _, _ = socket.recv_fds(control, LENGTH.size, 2)
        if message == NO_CHILD:
            raise OSError("the host starts no further process")
        if len(handles) < 2:
            raise ConnectionError(f"{self._what}'s process ended")
        return message, handles

    def stop(self) -> None:
        """End it and all that it has started."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
        if self._folder is not None:
            self._folder.remove()
        self._process = self._control = self._folder = None

    async def _start(self, again: bool = False) -> socket.socket:
        """Return the process's socket; one that is killed while it loads is followed by another."""
        if self._process is not None and self._control is not None and self._process.poll() is None:
            return self._control
        self.stop()
        control, theirs = socket.socketpair()
        control.setblocking(False)
        self._control, self._folder = control, ScratchFolder()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, open(self._log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                preexec_fn=die_with_parent(signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(_START_SECONDS):
                folder = self._folder.path
                start = Start(limits=self._limits, folder=folder, code=self._code)
                await _send(control, framed(start))
                (length,) = LENGTH.unpack(await _receive(control, LENGTH.size))
                self.started = _started.decode(await _receive(control, length))
        except TimeoutError as error:
            self.stop()
            raise ConfigError(f"{self._what} isn't loaded within {_START_SECONDS:g} s") from error
        except ConnectionError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
            killed = self._process.returncode == -signal.SIGKILL
            self.stop()
            if killed and not again:
                return await self._start(again=True)
            said = last_line(self._log.read_bytes())
            raise ConfigError(f"{self._what}'s process ended while it loaded: {said}") from error
        if self.started.error is not None:
            self.stop()
            raise ConfigError(self.started.error)
        return control


async def _send(control: socket.socket, message: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(control, message)


async def _receive(control: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = await asyncio.get_running_loop().sock_recv(control, count - len(parts))
        if not part:
            raise ConnectionError("the process ended")
        parts += part
    return parts


async def _readable(control: socket.socket) -> None:
    """Wait for a message whose handles a plain read would lose."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_reader(control, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(control)
