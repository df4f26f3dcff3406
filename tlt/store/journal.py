"""The journal: one writer appends every event in the order in which `decide` consumed it.

A line holds the schema's version, the event, the time that `decide` was given, a digest of the
commands that came out, and a checksum. A torn last line is no entry. Lines after the position that
the store names as committed don't count: the next writer cuts them off, and their events are
decided again.
"""

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from tlt.base.id_types import Digest
from tlt.errors import JournalError
from tlt.protocol.commands import Command
from tlt.protocol.events import AnyEvent
from tlt.protocol.refs import SCHEMA_VERSION

FILE_NAME = "journal.jsonl"


class JournalEntry(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    seq: int
    schema: int
    at: float
    event: AnyEvent
    commands: Digest
    # of the line before it; lines of earlier versions have none
    crc: int | None = None


class _Header(msgspec.Struct):
    """The part of a line that every schema has; schema 1 didn't write its number."""

    schema: int = 1


class Position(msgspec.Struct, frozen=True, array_like=True):
    """The end of an entry, as the number of entries and bytes up to it."""

    entries: int = 0
    bytes: int = 0


START = Position()
_CRC = b',"crc":'

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(JournalEntry)
_headers = msgspec.json.Decoder(_Header)
_commands = msgspec.msgpack.Encoder()


def digest(commands: Sequence[Command]) -> Digest:
    return Digest(hashlib.blake2b(_commands.encode(commands), digest_size=12).hexdigest())


class Journal:
    def __init__(self, folder: Path, committed: Position) -> None:
        self.path = folder / FILE_NAME
        self.position = committed
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(self.path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be written: {error.strerror}") from error
        size = self._file.seek(0, os.SEEK_END)
        if size < committed.bytes:
            self._file.close()
            raise JournalError(f"{self.path}: {size} bytes, but {committed.bytes} were committed")
        self._roll_back(committed)

    def append(self, entries: Sequence[tuple[float, AnyEvent, Sequence[Command]]]) -> None:
        lines = bytearray()
        for offset, (at, event, commands) in enumerate(entries):
            entry = JournalEntry(
                seq=self.position.entries + offset,
                schema=SCHEMA_VERSION,
                at=at,
                event=event,
                commands=digest(commands),
            )
            line = _encoder.encode(entry)[:-1]
            lines += b"%b%b%d}\n" % (line, _CRC, zlib.crc32(line))
        try:
            view = memoryview(lines)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._roll_back(self.position)
            raise JournalError(f"{self.path}: cannot be written: {error.strerror}") from error
        self.position = Position(
            self.position.entries + len(entries), self.position.bytes + len(lines)
        )

    def _roll_back(self, position: Position) -> None:
        """Cut off what was appended but not committed."""
        try:
            self._file.truncate(position.bytes)
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be written: {error.strerror}") from error
        self.position = position

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read(path: Path, start: Position = START) -> Iterator[JournalEntry]:
    """Return the whole entries after a position."""
    for entry, _ in follow(path, start):
        yield entry


def follow(path: Path, start: Position = START) -> Iterator[tuple[JournalEntry, Position]]:
    """Return entries, each with the position after it, up to the present end of the file."""
    position = start
    try:
        with open(path, "rb") as file:
            file.seek(start.bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                entry = _decode(path, line, position)
                position = Position(position.entries + 1, position.bytes + len(line))
                yield entry, position
    except FileNotFoundError as error:
        raise JournalError(f"{path}: there is no journal") from error


def check_schema(folder: Path) -> None:
    """Raise JournalError if the journal in a folder begins with an entry that can't be read."""
    path = folder / FILE_NAME
    if path.exists():
        next(follow(path), None)


def holds(folder: Path, committed: Position) -> bool:
    """Return False if the journal in a folder lacks committed entries: it is another one."""
    path = folder / FILE_NAME
    return (path.stat().st_size if path.exists() else 0) >= committed.bytes


def _decode(path: Path, line: bytes, position: Position) -> JournalEntry:
    try:
        entry = _decoder.decode(line)
    except ValueError as error:  # msgspec's own, or text that is not UTF-8
        _check_version(path, _schema_of(line))
        raise JournalError(f"{path}: entry {position.entries} cannot be read: {error}") from error
    _check_version(path, entry.schema)
    if entry.crc is not None and entry.crc != zlib.crc32(line.rpartition(_CRC)[0]):
        raise JournalError(f"{path}: entry {position.entries} is damaged: its checksum differs")
    if entry.seq != position.entries:
        raise JournalError(f"{path}: entry {entry.seq} stands where {position.entries} should")
    return entry


def _schema_of(line: bytes) -> int:
    try:
        return _headers.decode(line).schema
    except ValueError:  # the line is damaged, whatever its schema
        return SCHEMA_VERSION


def _check_version(path: Path, schema: int) -> None:
    if schema != SCHEMA_VERSION:
        raise JournalError(
            f"{path}: written by TLT with journal schema {schema}; this version reads schema "
            f"{SCHEMA_VERSION}: finish or export that run with the older version"
        )
