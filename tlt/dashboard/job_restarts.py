"""How often each job of a session was begun again, from the session's own journal."""

from collections import Counter
from pathlib import Path

from tlt.errors import JournalError
from tlt.ids import JobId
from tlt.policies.job import job_queue
from tlt.policies.job.job_queue import SessionState
from tlt.protocol.commands import StartJob
from tlt.protocol.events import JobEnded, SessionResumed, WorkerLost
from tlt.store.journal import FILE_NAME, START, JournalEntry, follow


class Restarts:
    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE_NAME
        self._begin()

    def _begin(self) -> None:
        self.attempts: Counter[JobId] = Counter()
        self.losses: Counter[JobId] = Counter()
        self._running: JobId | None = None
        self._state = SessionState()
        self._position = START

    def look(self) -> None:
        """Up to now. What cannot be read is not counted; the jobs are listed all the same."""
        try:
            if self._file.stat().st_size < self._position.bytes:
                self._begin()
            for entry, after in follow(self._file, self._position):
                self._fold(entry)
                self._position = after
        except (OSError, JournalError):
            self._begin()

    def _fold(self, entry: JournalEntry) -> None:
        event = entry.event
        match event:
            case SessionResumed() if self._running is not None:
                self.attempts[self._running] += 1
            case WorkerLost() if self._running is not None:
                self.losses[self._running] += self._is_there(event)
            case JobEnded() if event.job == self._running:
                self._running = None
            case _:
                pass
        # the journal holds nothing but what the session's `decide` consumed
        self._state, commands = job_queue.decide(self._state, event, entry.at)  # pyright: ignore[reportArgumentType]
        for command in commands:
            if isinstance(command, StartJob):
                self._running = command.job
                self.attempts[command.job] = 1

    def _is_there(self, event: WorkerLost) -> bool:
        known = self._state.workers.get(event.worker)
        return known is not None and known.incarnation == event.incarnation
