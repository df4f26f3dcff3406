"""Numbers and names as people read them."""

from tlt.strategies import Draft, Ngram, Off, Strategy


def seconds(value: float) -> str:
    if round(value, 1) < 60:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def way(strategy: Strategy) -> str:
    """What a person calls a strategy."""
    match strategy:
        case Off():
            return "no guessing"
        case Ngram(tokens=tokens):
            return f"n-gram {tokens}"
        case Draft(depth=depth, noise=noise):
            return f"draft {depth}" + (" with noise" if noise else "")
