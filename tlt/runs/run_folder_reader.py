"""Read a run's folder: its spec and its journal, while it grows or afterwards."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tlt.base.id_types import JobId
from tlt.errors import ConfigError
from tlt.report import Ledger, Snapshot
from tlt.spec.config import JobSpec
from tlt.store.journal import FILE_NAME, START, JournalEntry, follow

_POLL_SECONDS = 0.2


def read_spec(folder: Path) -> JobSpec:
    try:
        return msgspec.json.decode((folder / "spec.json").read_bytes(), type=JobSpec)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder}: there is no run") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{folder / 'spec.json'}: {error}") from error


def has_journal(folder: Path) -> bool:
    return (folder / FILE_NAME).exists()


def journal_entries(folder: Path) -> Iterator[JournalEntry]:
    """Yield the entries up to now; none if the journal does not exist yet."""
    journal = folder / FILE_NAME
    if journal.exists():
        for entry, _ in follow(journal, START):
            yield entry


def follow_journal(folder: Path) -> Iterator[JournalEntry | None]:
    """Yield entries as they are appended, and None whenever there is nothing new."""
    journal = folder / FILE_NAME
    position = START
    while True:
        if journal.exists():
            for entry, after in follow(journal, position):
                position = after
                yield entry
        yield None
        time.sleep(_POLL_SECONDS)


def open_ledger(folder: Path) -> Ledger:
    """Return an empty ledger for the run's journal."""
    return Ledger(JobId(folder.name), read_spec(folder))


def read_ledger(folder: Path) -> Ledger:
    ledger = open_ledger(folder)
    for entry in journal_entries(folder):
        ledger.add(entry.event, entry.at)
    return ledger


def read_snapshot(folder: Path) -> Snapshot:
    return read_ledger(folder).snapshot()
