"""Attempts and worker losses of each job of a session, counted from the session's own journal."""

from collections import Counter
from pathlib import Path

from tlt.base.id_types import JobId
from tlt.errors import JournalError
from tlt.policies.session import job_queue
from tlt.policies.session.session_state import SessionState
from tlt.policies.session.workers_of_jobs import owner_of
from tlt.protocol.commands import StartJob
from tlt.protocol.events import SessionResumed, WorkerLost
from tlt.store.journal import FILE_NAME, START, JournalEntry, follow


class JobRestarts:
    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE_NAME
        self._reset()

    def _reset(self) -> None:
        self.attempts: Counter[JobId] = Counter()
        self.losses: Counter[JobId] = Counter()
        self._state = SessionState()
        self._position = START

    def update(self) -> None:
        """Read the journal up to now; a journal that cannot be read counts nothing."""
        try:
            if self._file.stat().st_size < self._position.bytes:
                self._reset()
            for entry, after in follow(self._file, self._position):
                self._add(entry)
                self._position = after
        except (OSError, JournalError):
            self._reset()

    def _add(self, entry: JournalEntry) -> None:
        event = entry.event
        match event:
            case SessionResumed():
                running = [job for job, e in self._state.in_hand.items() if e.status == "running"]
                self.attempts.update(running)
            case WorkerLost() if self._is_current(event):
                owner = owner_of(self._state, event.worker)
                if owner is not None and owner in self.attempts:
                    self.losses[owner] += 1
            case _:
                pass
        # this journal holds only events that the session's `decide` consumed
        self._state, commands = job_queue.decide(self._state, event, entry.at)  # pyright: ignore[reportArgumentType]
        for command in commands:
            if isinstance(command, StartJob):
                self.attempts[command.job] = 1

    def _is_current(self, event: WorkerLost) -> bool:
        known = self._state.workers.get(event.worker)
        return known is not None and known.incarnation == event.incarnation
