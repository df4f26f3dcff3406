"""How the commands speak: tables for people, JSON for programs, one line for an error."""

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def say(line: str) -> None:
    """One line, never wrapped, so that it can be searched in a pipe."""
    console.print(line, soft_wrap=True, markup=False)


def complain(line: str) -> None:
    errors.print(f"tlt: {line}", soft_wrap=True, markup=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns for people; a line a row, with tabs, for a pipe."""
    if not console.is_terminal:
        for row in (columns, *rows):
            say("\t".join(row))
        return
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*row)
    console.print(table)
