"""Following a run: its journal as it grows, until the job has ended."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tlt.config import JobSpec
from tlt.errors import ConfigError
from tlt.ids import JobId
from tlt.report import Ledger, Snapshot
from tlt.store.journal import FILE_NAME, START, JournalEntry, follow

_POLL_SECONDS = 0.2


def open_ledger(folder: Path) -> Ledger:
    try:
        spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=JobSpec)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder}: there is no run") from error
    return Ledger(JobId(folder.name), spec)


def entries(folder: Path) -> Iterator[JournalEntry]:
    """Up to now."""
    journal = folder / FILE_NAME
    if journal.exists():
        for entry, _ in follow(journal, START):
            yield entry


def live_entries(folder: Path) -> Iterator[JournalEntry | None]:
    """As they come; None whenever there is nothing new, so that the caller can look around."""
    journal = folder / FILE_NAME
    position = START
    while True:
        if journal.exists():
            for entry, after in follow(journal, position):
                position = after
                yield entry
        yield None
        time.sleep(_POLL_SECONDS)


def fold(folder: Path) -> Snapshot:
    return folded(folder).snapshot()


def folded(folder: Path) -> Ledger:
    ledger = open_ledger(folder)
    for entry in entries(folder):
        ledger.add(entry.event, entry.at)
    return ledger
