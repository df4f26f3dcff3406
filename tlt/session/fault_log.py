"""The processes that a supervisor watches, and the faults that it has found, as a file.

The supervisor writes it; `tlt status`, the dashboard and `tlt top` read it, even without Redis.
"""

import contextlib
from pathlib import Path

import msgspec
import structlog

from tlt.base.end_session_processes import ProcessId
from tlt.base.human_format import seconds
from tlt.session.session_files import replace_file

_FILE = "supervised.json"
_KEPT = 20
_RECENT_SECONDS = 600.0
_log = structlog.get_logger("supervisor")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """The end of processes that others need, from when it was noticed until all work again."""

    process: str
    ended_at: float
    healed_at: float | None = None
    # how often they were started again
    tries: int = 0
    # why the last try failed
    error: str | None = None


class Supervised(msgspec.Struct, frozen=True, kw_only=True):
    processes: dict[str, ProcessId] = {}
    # oldest first
    faults: tuple[Fault, ...] = ()

    @property
    def healing(self) -> list[Fault]:
        return [fault for fault in self.faults if fault.healed_at is None]

    def recent(self, now: float) -> list[Fault]:
        """Return the faults that are being healed, or were healed in the last ten minutes."""
        return [
            fault
            for fault in self.faults
            if fault.healed_at is None or now - fault.healed_at <= _RECENT_SECONDS
        ]


def describe_fault(fault: Fault, now: float) -> str:
    ended = f"{fault.process} ended {seconds(max(0.0, now - fault.ended_at))} ago"
    if fault.healed_at is not None:
        return f"{ended}; all worked again {seconds(fault.healed_at - fault.ended_at)} later"
    failed = f" (try {fault.tries}; {fault.error})" if fault.error is not None else ""
    return f"{ended}; starting again{failed}"


class FaultLog:
    """Write each change into the file and the log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._faults: list[Fault] = []
        self._processes: dict[str, ProcessId] = {}
        # True if the file is out of date, because the disk was full
        self._unwritten = False

    def watch(self, processes: dict[str, ProcessId]) -> None:
        if processes != self._processes or self._unwritten:
            self._processes = processes
            self._write()

    def record_fault(self, process: str, now: float) -> Fault:
        fault = Fault(process=process, ended_at=now)
        _log.warning("ended, starting again", process=process)
        self._faults = [*self._faults, fault][-_KEPT:]
        self._write()
        return fault

    def record_retry(self, fault: Fault) -> Fault:
        return self._replace(fault, tries=fault.tries + 1)

    def record_failure(self, fault: Fault, error: str) -> Fault:
        _log.error("start failed", process=fault.process, tries=fault.tries, error=error)
        return self._replace(fault, error=error)

    def record_recovery(self, fault: Fault, now: float) -> None:
        _log.info("back at work", process=fault.process, seconds=round(now - fault.ended_at, 1))
        self._replace(fault, healed_at=now)

    def _replace(self, fault: Fault, **changes: object) -> Fault:
        changed = msgspec.structs.replace(fault, **changes)
        self._faults = [changed if each is fault else each for each in self._faults]
        self._write()
        return changed

    def _write(self) -> None:
        supervised = Supervised(processes=self._processes, faults=tuple(self._faults))
        self._unwritten = True
        with contextlib.suppress(OSError):  # a full disk must not end what heals the session
            replace_file(self._folder / _FILE, msgspec.json.encode(supervised))
            self._unwritten = False


def read_supervised(folder: Path) -> Supervised:
    """Return nothing supervised if there is no file, or one of another release."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=Supervised)
    except (OSError, msgspec.DecodeError):
        return Supervised()
