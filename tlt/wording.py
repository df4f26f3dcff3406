"""Numbers and names as people read them."""

from tlt.strategies import Draft, Ngram, Off, Strategy


def seconds(value: float) -> str:
    if value < 60:
        return f"{value:.1f} s"
    return f"{int(value) // 60} min {int(value) % 60:02d} s"


def way(strategy: Strategy) -> str:
    """What a person calls a strategy."""
    match strategy:
        case Off():
            return "no guessing"
        case Ngram(tokens=tokens):
            return f"n-gram {tokens}"
        case Draft(depth=depth, noise=noise):
            return f"draft {depth}" + (" with noise" if noise else "")
