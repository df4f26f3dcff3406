"""SGLang's schedulers, one a device, as child processes: they end with this one, not the reverse.

Upstream, a failing scheduler sends its parent a signal, upon which the parent kills itself and all
its children. Here the signal is ignored and the processes are polled.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from tlt.base.child_process import die_with_parent
from tlt.engine.sglang.client.stuck_watch import StuckWatch, tree_busy_seconds
from tlt.errors import RankError

_LAST_LINES = 3
# a process that closed its pipe may take a moment to write a core or free a device
_END_SECONDS = 5.0


class SchedulerProcess:
    def __init__(
        self,
        device: str,
        environment: Mapping[str, str],
        log: Path,
        descriptors: Sequence[int] = (),
        cores: Sequence[int] = (),
    ) -> None:
        """Start the child, which inherits `descriptors` and ends with the calling thread.

        Without `cores` it may use those of this process.
        """
        self.channel, theirs = Pipe()
        self.log = log
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tlt.engine.sglang.scheduler.scheduler_main",
        ]
        command += [str(theirs.fileno()), device]
        end_with_parent = die_with_parent(signal.SIGKILL)

        def before_exec() -> None:
            end_with_parent()
            if cores:
                os.sched_setaffinity(0, cores)

        with theirs, log.open("ab") as output:
            self._began = output.tell()
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), *descriptors),
                preexec_fn=before_exec,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_setup(self, arguments: Any, ports: Any, gpu: int, tensor_rank: int) -> None:
        """Send SGLang's own structs, pickled as upstream does."""
        # tensors are shared by descriptors, for which both processes need the same key
        authkey = bytes(multiprocessing.current_process().authkey)
        self._exchange(lambda: self.channel.send((authkey, arguments, ports, gpu, tensor_rank)))

    def ready(self) -> dict[str, Any]:
        return self._exchange(self.channel.recv)

    def failure(self) -> str | None:
        """Say how the process ended, with its last lines, or return None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        lines = self.last_lines()
        return f"{how}: {lines}" if lines else how

    def last_lines(self) -> str:
        with self.log.open("rb") as log:
            # the log may have been emptied meanwhile
            log.seek(self._began if self._began <= log.seek(0, os.SEEK_END) else 0)
            lines = log.read().decode(errors="replace").split("\n")
        # text after a carriage return is a progress bar
        texts = [line.partition("\r")[0].strip() for line in lines]
        return " | ".join([text for text in texts if text][-_LAST_LINES:])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.channel.close()

    def _exchange(self, exchange: Any) -> Any:
        try:
            return exchange()
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            raise RankError(f"SGLang's scheduler {self.failure() or 'hung up'}") from error


class SchedulerGroup:
    """The schedulers that hold a part of each weight; the first talks with the rank."""

    def __init__(
        self,
        device: str,
        environment: Mapping[str, str],
        log: Path,
        cores: Sequence[Sequence[int]],
        descriptors: Sequence[int],
        stuck_seconds: float,
    ) -> None:
        """Start a child for each entry of `cores`; only the first inherits `descriptors`.

        The others append their output to `log` with their number before its suffix.
        """
        self._stuck_seconds = stuck_seconds
        # by scheduler: what it said of itself when it became ready
        self.said: list[dict[str, Any]] = []
        self._members: list[SchedulerProcess] = []
        for rank, own_cores in enumerate(cores):
            path = log if rank == 0 else log.with_name(f"{log.stem}-{rank}{log.suffix}")
            inherited = descriptors if rank == 0 else ()
            member = SchedulerProcess(device, environment, path, inherited, own_cores)
            self._members.append(member)

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    def send_setup(self, arguments: Any, ports: Any, first_gpu: int) -> None:
        for rank, member in enumerate(self._members):
            member.send_setup(arguments, ports, first_gpu + rank, rank)

    def ready(self) -> list[dict[str, Any]]:
        """Wait until all are ready; return what each says of itself.

        Raise RankError if one ends, or if they do nothing and print nothing.
        """
        waiting = {member.channel: member for member in self._members}
        infos: dict[int, dict[str, Any]] = {}
        watch = StuckWatch(self._stuck_seconds, lambda: tree_busy_seconds(self.pids))
        printed = self._printed
        while waiting:
            # the channel of a process that has ended can be read from, too
            for channel in wait(list(waiting), min(1.0, self._stuck_seconds / 4)):
                assert isinstance(channel, Connection)
                member = waiting.pop(channel)
                infos[member.pid] = member.ready()
            if self._printed != printed:
                printed = self._printed
                watch.note_progress()
            self._require_start(watch)
        self.said = [infos[member.pid] for member in self._members]
        return self.said

    @property
    def _printed(self) -> int:
        return sum(member.log.stat().st_size for member in self._members)

    def _require_start(self, watch: StuckWatch) -> None:
        if (failure := self.failure()) is not None:
            raise RankError(f"SGLang's scheduler {failure}")
        if (complaint := watch.complaint()) is not None:
            raise RankError(
                f"SGLang {complaint} while it started; see {self._members[0].log}, or set longer "
                f"workers.stuck_seconds: {self.last_lines()}"
            )

    def failure(self) -> str | None:
        """Say how the first that ended did so, or return None while all run."""
        return next(filter(None, (member.failure() for member in self._members)), None)

    def last_lines(self) -> str:
        return " | ".join(filter(None, (member.last_lines() for member in self._members)))

    def kill(self) -> None:
        for member in self._members:
            member.kill()
