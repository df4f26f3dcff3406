"""How the commands speak: tables for people, JSON for programs, one line for an error."""

import sys
from typing import Any

import msgspec
from rich.console import Console

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def say(line: str) -> None:
    """One line, never wrapped, so that it can be searched in a pipe."""
    console.print(line, soft_wrap=True, markup=False)


def complain(line: str) -> None:
    errors.print(f"tlt: {line}", soft_wrap=True, markup=False)


def seconds(value: float) -> str:
    if value < 60:
        return f"{value:.1f} s"
    return f"{int(value) // 60} min {int(value) % 60:02d} s"
