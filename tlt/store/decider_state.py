"""A decider's state and the journal it can be rebuilt from: a snapshot, then the entries after it.

What was decided but not committed is forgotten with the process that decided it.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from tlt.errors import JournalError
from tlt.protocol.commands import Command
from tlt.protocol.events import AnyEvent
from tlt.store.journal import FILE_NAME, START, Journal, Position, digest, follow

_State = TypeVar("_State")
_SNAPSHOT_EVERY = 2000

Decide = Callable[[_State, Any, float], tuple[_State, Sequence[Command]]]


class Snapshot(msgspec.Struct, frozen=True):
    position: Position
    state: msgspec.Raw


class DeciderState(Generic[_State]):
    def __init__(
        self, folder: Path, committed: Position, blank: _State, decide: Decide[_State]
    ) -> None:
        self.folder = folder
        self.journal = Journal(folder, committed)
        self._decide = decide
        self._pending: list[tuple[float, AnyEvent, Sequence[Command]]] = []
        try:
            self.state, self._snapshot_at = _rebuild(folder, committed, blank, decide)
        except BaseException:
            self.journal.close()
            raise

    def decide(self, event: AnyEvent, now: float) -> Sequence[Command]:
        self.state, commands = self._decide(self.state, event, now)
        self._pending.append((now, event, commands))
        return commands

    def write(self) -> Position:
        """To the file, so that a transaction can name how far it reaches."""
        self.journal.append(self._pending)
        self._pending.clear()
        return self.journal.position

    def snapshot_if_due(self) -> None:
        """Call it after the commit: a snapshot must never be ahead of what is committed."""
        if self.journal.position.entries - self._snapshot_at < _SNAPSHOT_EVERY:
            return
        self._snapshot_at = self.journal.position.entries
        state = msgspec.Raw(msgspec.msgpack.encode(self.state))
        snapshot = msgspec.msgpack.encode(Snapshot(self.journal.position, state))
        unfinished = self.folder / ".snapshot-unfinished"
        # It saves time only, the journal holds everything: on a full disk there is none.
        with contextlib.suppress(OSError):
            unfinished.write_bytes(snapshot)
            os.replace(unfinished, _snapshot_file(self.folder))

    def abandon(self) -> None:
        """Nothing can be written there."""
        self.journal.close()

    def close(self) -> None:
        self.journal.sync()
        self.journal.close()


def replay(
    path: Path, blank: _State, decide: Decide[_State], start: Position = START
) -> tuple[_State, Position]:
    """Decide every entry again; the commands must be those of the first time."""
    state, position = blank, start
    for entry, after in follow(path, start):
        state, commands = decide(state, entry.event, entry.at)
        if digest(commands) != entry.commands:
            raise JournalError(f"{path}: entry {entry.seq} gives other commands than it did")
        position = after
    return state, position


def _rebuild(
    folder: Path, committed: Position, blank: _State, decide: Decide[_State]
) -> tuple[_State, int]:
    state, start = blank, START
    # One that is missing, torn or of another version costs time: the whole journal is replayed.
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        snapshot = msgspec.msgpack.decode(_snapshot_file(folder).read_bytes(), type=Snapshot)
        if snapshot.position.entries <= committed.entries:
            state = msgspec.msgpack.decode(snapshot.state, type=type(blank))
            start = snapshot.position
    state, position = replay(folder / FILE_NAME, state, decide, start)
    if position != committed:
        raise JournalError(f"{folder / FILE_NAME}: {position} read, {committed} were committed")
    return state, start.entries


def _snapshot_file(folder: Path) -> Path:
    return folder / "snapshot.msgpack"
