"""Start Ray's head in a process of its own, watch it, and end it with all that it has started.

In the supervisor's process, Ray's client would wait for a dead GCS for a minute and then end the
process. A worker notices only after a minute, too, that its raylet is gone.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tlt.base.child_process import die_with_parent, last_line
from tlt.base.end_session_processes import (
    ProcessId,
    await_end,
    end_processes,
    identify,
    is_child,
    is_running,
    mark,
    processes_of,
)
from tlt.base.log_rotation import KEPT, MOST_BYTES

# by the name of the daemon's program
_DAEMONS = {b"raylet": "Ray's raylet", b"gcs_server": "Ray's GCS"}
_DRIVER = "Ray's driver"
# they end by themselves once the coordinator has ended, after they have sent what they hold
_LOGGERS = (b"tlt.loggers.main",)
_LOGGERS_SECONDS = 12.0
_LEAVE_SECONDS = 20.0


class RayHead:
    """Ray's driver and daemons, and below them the actors and ranks of a session."""

    def __init__(self, session: Path, short: Path, *, in_cluster: bool = False) -> None:
        """Own only the driver if the session is in a cluster; actors may be on other hosts."""
        self._session = session
        self._in_cluster = in_cluster
        self._temporary = short / "ray"
        # removed with the session's other files, whatever is killed before it can tidy up
        self._scratch = short / "tmp"
        self._log = session / "logs" / "ray.out"
        self._driver: subprocess.Popen[bytes] | None = None
        self._began = 0
        self.processes: dict[str, ProcessId] = {}

    def start(self) -> None:
        """Start it, after the end of all that an earlier one has left."""
        self.end()
        self._scratch.mkdir(mode=0o700, exist_ok=True)
        with open(self._log, "ab") as output:
            self._began = output.tell()
            self._driver = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tlt.actors.supervisor.ray_head_main"),
                    *(str(self._session), str(self._temporary)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._environment()},
                preexec_fn=die_with_parent(signal.SIGKILL),
                start_new_session=True,
            )

    def ended(self) -> str | None:
        """Name the parts that have ended, or return None while all run."""
        driver = self._driver
        if driver is not None and len(self.processes) <= len(_DAEMONS):
            self._find_daemons(driver.pid)
        ended = [name for name, process in self.processes.items() if not is_running(process)]
        if not ended and (driver is None or driver.poll() is not None):
            return _DRIVER
        return " and ".join(ended) or None

    def complaint(self) -> str:
        """Return the last line that the driver has written."""
        with open(self._log, "rb") as log:
            # the log may have been emptied meanwhile
            log.seek(self._began if self._began <= log.seek(0, os.SEEK_END) else 0)
            return last_line(log.read())

    def end(self) -> None:
        """Kill it and all that it has started, but for loggers; keep Ray's logs."""
        if self._driver is not None:
            # by itself, because one that has just begun doesn't carry the session's mark yet
            self._driver.kill()
            self._driver.wait()
            self._driver = None
        end_processes(self._session, spared=_LOGGERS)
        self.processes = {}
        self._keep_logs()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def stop(self) -> None:
        """End it for good: wait for loggers too, and then kill them."""
        if self._in_cluster and self._driver is not None:
            # it removes the files of other hosts
            self._driver.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._driver.wait(_LEAVE_SECONDS)
        self.end()
        await_end(self._session, _LOGGERS_SECONDS)
        end_processes(self._session)

    def _find_daemons(self, driver: int) -> None:
        found = {_DRIVER: identify(driver)}
        daemons = {} if self._in_cluster else processes_of(self._session)
        for pid, command in daemons.items():
            name = _DAEMONS.get(os.path.basename(command.split(b"\0")[0]))
            if name is not None and is_child(pid, driver):
                found[name] = identify(pid)
        self.processes = {name: process for name, process in found.items() if process is not None}

    def _keep_logs(self) -> None:
        """Keep the daemons' logs of the last head that has ended, which say why it did."""
        kept = self._session / "logs" / "ray-ended"
        for logs in self._temporary.glob("session_2*/logs"):
            shutil.rmtree(kept, ignore_errors=True)
            with contextlib.suppress(OSError):
                shutil.copytree(logs, kept, symlinks=True)

    def _environment(self) -> dict[str, str]:
        """Return what the driver and all that it starts on this host add to the environment."""
        own = {**mark(self._session), "TMPDIR": str(self._scratch)}
        if self._in_cluster:
            return own
        token = self._session / "ray-token"
        # it is empty if the disk was full
        if not token.exists() or token.stat().st_size == 0:
            token.touch(mode=0o600)
            token.write_text(os.urandom(32).hex())
        cache = f"torchinductor_{os.getuid()}"
        return {
            **own,
            # by default it is in TMPDIR, and what was compiled would be lost with the session
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get(
                "TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), cache)
            ),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            # by default each log of Ray's grows to 512 MB, six times
            "RAY_ROTATION_MAX_BYTES": str(MOST_BYTES),
            "RAY_ROTATION_BACKUP_COUNT": str(KEPT - 1),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            # By default Ray runs its workers, and so the ranks, at a lower priority.
            "RAY_worker_niceness": "0",
            # Ray's processes would write their titles over their environment, and so over the mark.
            "SPT_NOENV": "1",
        }
