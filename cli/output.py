"""Print tables, log lines of a journal, JSON for programs, and errors on one line."""

import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tlt.report import Ledger
from tlt.report.journal_log_lines import log_lines
from tlt.store.journal import JournalEntry


def timed_lines(ledger: Ledger, entry: JournalEntry) -> list[str]:
    """Add the entry to the ledger and return the lines that describe it."""
    clock = time.strftime("%H:%M:%S", time.localtime(entry.at))
    transition = ledger.add(entry.event, entry.at)
    return [f"{clock}  {line}" for line in log_lines(ledger, transition)]


# texts of models and users, such as `taskset:x:`, are printed as they are
console = Console(highlight=False, emoji=False)
errors = Console(stderr=True, highlight=False, emoji=False)


def print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def say(line: str) -> None:
    """Print one line, never wrapped, so that it can be searched in a pipe."""
    console.print(line, soft_wrap=True, markup=False)


def complain(line: str) -> None:
    errors.print(f"tlt: {line}", soft_wrap=True, markup=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns on a terminal, tab-separated lines in a pipe."""
    if not console.is_terminal:
        for row in (columns, *rows):
            say("\t".join(row))
        return
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def number_table(*columns: str) -> Table:
    """Return a table whose columns are aligned to the right, but for the first."""
    table = Table(*columns, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def say_outcome(job: str, status: str, error: str | None) -> None:
    complain(f"{job} {status}" + (f": {error}" if error else ""))
