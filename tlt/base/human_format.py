"""Format numbers and names for people."""

from collections.abc import Sequence

from tlt.base.strategies import Draft, Ngram, Off, Strategy

_BLOCKS = "▁▂▃▄▅▆▇█"


def seconds(value: float) -> str:
    if round(value, 1) < 60:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def size(count: int) -> str:
    """Return bytes with a unit, to two digits or more."""
    for unit, bytes_ in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.1 * bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count} bytes"


def one_line(error: Exception) -> str:
    """Return the beginning of an error's message, without its line breaks."""
    return " ".join(str(error).split())[:200]


def words(name: str) -> str:
    """Return the name of a phase or a duty as people read it."""
    return name.replace("_", " ")


def name_strategy(strategy: Strategy) -> str:
    match strategy:
        case Off():
            return "no speculation"
        case Ngram(tokens=tokens):
            return f"n-gram {tokens}"
        case Draft(depth=depth, noise=noise):
            return f"draft {depth}" + (" with noise" if noise else "")


def sparkline(values: Sequence[float]) -> str:
    """Draw a line of values as one character each."""
    low, high = min(values), max(values)
    width = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, int(8 * (value - low) / width))] for value in values)
