"""Rebuild the state of a decider from its journal: a snapshot, then the entries after it.

Decisions that were not committed are lost with the process that made them.
"""

import contextlib
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from tlt.errors import JournalError
from tlt.protocol.commands import Command
from tlt.protocol.events import AnyEvent
from tlt.protocol.refs import SCHEMA_VERSION
from tlt.store.journal import FILE_NAME, START, Journal, Position, digest, follow

_State = TypeVar("_State")
SNAPSHOT_FILE = "snapshot.msgpack"
SNAPSHOT_ENTRIES = 2000
# counted up when states get another layout; the journal's entries keep theirs
_LAYOUT = 3
_encode = msgspec.msgpack.Encoder().encode

Decide = Callable[[_State, Any, float], tuple[_State, Sequence[Command]]]


class Snapshot(msgspec.Struct, frozen=True):
    schema: int
    position: Position
    state: msgspec.Raw
    # of the layout, the position and the state; snapshots of another layout are not read
    checksum: int = 0

    @property
    def intact(self) -> bool:
        return self.checksum == _checksum(self.position, self.state)


def encode_snapshot(position: Position, state: object) -> bytes:
    raw = msgspec.Raw(_encode(state))
    return _encode(Snapshot(SCHEMA_VERSION, position, raw, _checksum(position, raw)))


def _checksum(position: Position, state: msgspec.Raw) -> int:
    return zlib.crc32(state, zlib.crc32(_encode((_LAYOUT, position))))


class DeciderState(Generic[_State]):
    def __init__(
        self,
        folder: Path,
        committed: Position,
        initial: _State,
        decide: Decide[_State],
        snapshot_entries: int = SNAPSHOT_ENTRIES,
    ) -> None:
        self.folder = folder
        self.journal = Journal(folder, committed)
        self._decide = decide
        self._snapshot_entries = snapshot_entries
        self._pending: list[tuple[float, AnyEvent, Sequence[Command]]] = []
        try:
            self.state, self._snapshot_at = _rebuild(folder, committed, initial, decide)
        except BaseException:
            self.journal.close()
            raise

    def decide(self, event: AnyEvent, now: float) -> Sequence[Command]:
        self.state, commands = self._decide(self.state, event, now)
        self._pending.append((now, event, commands))
        return commands

    @property
    def has_unwritten(self) -> bool:
        return bool(self._pending)

    def write(self) -> Position:
        """Append the pending decisions to the file and return the end of the last one."""
        self.journal.append(self._pending)
        self._pending.clear()
        return self.journal.position

    def snapshot_if_due(self) -> None:
        """Write a snapshot; only after the commit, because it must not be ahead of the journal."""
        if self.journal.position.entries - self._snapshot_at < self._snapshot_entries:
            return
        self._snapshot_at = self.journal.position.entries
        snapshot = encode_snapshot(self.journal.position, self.state)
        unfinished = self.folder / ".snapshot-unfinished"
        # A snapshot only saves time, so a full disk is no failure.
        with contextlib.suppress(OSError):
            unfinished.write_bytes(snapshot)
            os.replace(unfinished, self.folder / SNAPSHOT_FILE)

    def close(self) -> None:
        self.journal.sync()
        self.journal.close()


def replay(
    path: Path, initial: _State, decide: Decide[_State], start: Position = START
) -> tuple[_State, Position]:
    """Decide every entry again, and check that the commands are the same as before."""
    state, position = initial, start
    for entry, after in follow(path, start):
        state, commands = decide(state, entry.event, entry.at)
        if digest(commands) != entry.commands:
            raise JournalError(f"{path}: entry {entry.seq} gives other commands than it did")
        position = after
    return state, position


def _rebuild(
    folder: Path, committed: Position, initial: _State, decide: Decide[_State]
) -> tuple[_State, int]:
    state, start = initial, START
    # A snapshot that is missing, damaged or of another schema costs a replay of the whole journal.
    # ValueError: msgspec's own, or text that is not UTF-8
    with contextlib.suppress(OSError, ValueError):
        snapshot = msgspec.msgpack.decode((folder / SNAPSHOT_FILE).read_bytes(), type=Snapshot)
        ahead = snapshot.position.entries > committed.entries
        if snapshot.schema == SCHEMA_VERSION and snapshot.intact and not ahead:
            state = msgspec.msgpack.decode(snapshot.state, type=type(initial))
            start = snapshot.position
    state, position = replay(folder / FILE_NAME, state, decide, start)
    if position != committed:
        raise JournalError(f"{folder / FILE_NAME}: {position} read, {committed} were committed")
    return state, start.entries
