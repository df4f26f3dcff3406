"""Keep what checks find: a line of JSON for each, added as soon as it is known.

Whatever is killed leaves the lines before. A check has a line when it begins, too, so that the last
one says what ran.
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

Figures = dict[str, Any]
Check = Callable[[], Figures]
Status = Literal["begun", "passed", "failed", "skipped", "not begun"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    part: str
    check: str
    status: Status
    seconds: float = 0.0
    figures: Figures = {}
    # error, or reason why it was skipped
    why: str = ""


class Outcomes(NamedTuple):
    # its first line says what was run where
    file: Path
    # descriptor on which those that have ended are printed
    screen: int = 1

    def add(self, outcome: Outcome) -> None:
        with self.file.open("ab") as lines:
            lines.write(msgspec.json.encode(outcome, enc_hook=_plain) + b"\n")
        if outcome.status != "begun":
            what = outcome.why or outcome.figures
            text = f"{outcome.part} {outcome.check} {outcome.status} {what}\n"
            os.write(self.screen, text.encode())

    def read(self) -> list[Outcome]:
        _, *lines = self.file.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Outcome) for line in lines]


def keep_earlier(file: Path) -> None:
    """Rename an earlier run's outcomes by the time at which they ended."""
    with contextlib.suppress(FileNotFoundError):
        ended = time.gmtime(file.stat().st_mtime)
        file.rename(file.with_stem(f"{file.stem}-{time.strftime('%Y%m%d-%H%M%S', ended)}"))


def _plain(value: Any) -> Any:
    """Return a number of NumPy's as one of Python's, and the text of anything else."""
    return value.item() if hasattr(value, "item") else str(value)


def beside(measured: float, predicted: float) -> dict[str, float]:
    """Return a figure with its prediction, both with four digits."""
    return {"measured": float(f"{measured:.4g}"), "predicted": float(f"{predicted:.4g}")}
