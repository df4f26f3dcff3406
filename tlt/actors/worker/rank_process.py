"""Start a rank, exchange messages with it, and kill it; the process ends with its worker.

The parent-death signal depends on the thread that starts the child, so that thread has to run as
long as the worker.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import msgspec

from tlt.base.child_process import die_with_parent
from tlt.errors import RankError
from tlt.protocol.rank_messages import FromRank, RankReady, RankSetup, ToRank
from tlt.ranks.worker_channel import Progress, pack, read_from_rank

RANK_MODULE = "tlt.ranks.main"
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 256
_ADDRESS = slice(20, 24)


def interface_of(address: str) -> str | None:
    """Return the name of the interface with an IPv4 address, or None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_BYTES}s", name.encode())
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no such address
                continue
            if socket.inet_ntoa(answer[_ADDRESS]) == address:
                return name
    return None


class RankProcess:
    """The worker's end of a rank."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        progress: Progress,
        log: Path,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._progress = progress
        self._log = log
        self.rendezvous = ""

    @classmethod
    async def start(
        cls, setup: RankSetup, *, cores: frozenset[int], logs: Path, module: str = RANK_MODULE
    ) -> "RankProcess":
        """Start a rank on these cores; it can be used after `wait_ready`."""
        name = f"{setup.worker}-rank{setup.rank}"
        ours, theirs = socket.socketpair()
        memory = os.memfd_create(f"tlt-{name}")
        os.ftruncate(memory, Progress.SIZE)
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{name}.log"

        end_with_worker = die_with_parent(signal.SIGKILL)

        def before_exec() -> None:
            end_with_worker()
            if cores:
                os.sched_setaffinity(0, cores)

        command = [sys.executable, "-m", module]
        command += [str(theirs.fileno()), str(memory), msgspec.json.encode(setup).decode()]
        with theirs, open(log, "ab") as output:
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), memory),
                preexec_fn=before_exec,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # The kernel divides cores among process sessions (autogroup). Where the ranks of
                # two sessions are pinned to one core, one may be left a hundredth of it.
                start_new_session=True,
                env=_environment(setup.host),
            )
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 26)
        except BaseException:  # nobody else knows the process
            process.kill()
            process.wait()
            raise
        progress = Progress(memory)
        os.close(memory)
        return cls(process, reader, writer, progress, log)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def progress(self) -> tuple[int, int]:
        """Return the work done and the requests running."""
        return self._progress.read()

    async def wait_ready(self, deadline_seconds: float) -> None:
        """Wait until the rank can take commands."""
        try:
            first = await asyncio.wait_for(self.receive(), deadline_seconds)
        except TimeoutError as error:
            raise RankError(f"not ready after {deadline_seconds:.0f} s") from error
        if not isinstance(first, RankReady):
            raise RankError(f"its first message was {type(first).__name__}")
        self.rendezvous = first.rendezvous

    def send(self, message: ToRank) -> None:
        """Send a message; it waits in memory while the rank computes."""
        if self._writer.is_closing():
            raise RankError(self._describe_end())
        self._writer.write(pack(message))

    async def receive(self) -> FromRank:
        """Return the rank's next message; raise RankError if it has ended."""
        try:
            return await read_from_rank(self._reader)
        except RankError as error:
            raise RankError(self._describe_end()) from error

    def kill(self) -> None:
        """Kill the process."""
        self._writer.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)

    def _describe_end(self) -> str:
        """Return how the process ended, and the last line of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)
        code = self._process.returncode
        how = "closed its socket" if code is None else f"ended with {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        with contextlib.suppress(OSError):
            lines = self._log.read_text(errors="replace").strip().splitlines()
            if lines and code not in (None, 0) and code > 0:
                how += f": {lines[-1]}"
        return f"rank {self._log.stem} {how}"


def _environment(host: str) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # By default Gloo finds its interface by the host's name, which may not resolve.
    if (interface := interface_of(host)) is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        if host != "127.0.0.1":
            environment.setdefault("NCCL_SOCKET_IFNAME", interface)
    return environment
