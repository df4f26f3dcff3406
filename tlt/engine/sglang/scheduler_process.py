"""SGLang's scheduler as a child: it ends with this process, and never this process with it.

Upstream, a scheduler that fails sends its parent a signal upon which the parent kills itself and
all its children. Here the signal is ignored, and the end of the process is what is looked at.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from tlt.child_process import die_with_parent
from tlt.errors import RankError

_LAST_LINES = 3
# a process that closed its pipe is ending; it may take a moment to write a core or free a device
_END_SECONDS = 5.0


class SchedulerProcess:
    def __init__(self, device: str, environment: Mapping[str, str], log: Path) -> None:
        """To be called by a thread that lives as long as the process should."""
        self._channel, theirs = Pipe()
        self._log = log
        command = [sys.executable, "-W", "ignore", "-m", "tlt.engine.sglang.scheduler_main"]
        command += [str(theirs.fileno()), device]
        with theirs, log.open("ab") as output:
            self._began = output.tell()
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                preexec_fn=die_with_parent(signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, arguments: Any, ports: Any, gpu: int) -> None:
        """Structs of SGLang's, for a process of the same SGLang: pickled, as it does itself."""
        # tensors that are shared with it go by descriptors, for which both must hold one key
        authkey = bytes(multiprocessing.current_process().authkey)
        self._exchange(lambda: self._channel.send((authkey, arguments, ports, gpu)))

    def ready(self) -> dict[str, Any]:
        return self._exchange(self._channel.recv)

    def died(self) -> str | None:
        """How it ended, and the last that it said; None while it lives."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        said = self.last_lines()
        return f"{how}: {said}" if said else how

    def last_lines(self) -> str:
        with self._log.open("rb") as log:
            log.seek(self._began)
            lines = log.read().decode(errors="replace").split("\n")
        # what begins with a carriage return is a progress bar
        said = [line.partition("\r")[0].strip() for line in lines]
        return " | ".join([line for line in said if line][-_LAST_LINES:])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def _exchange(self, exchange: Any) -> Any:
        try:
            return exchange()
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            raise RankError(f"SGLang's scheduler {self.died() or 'hung up'}") from error
