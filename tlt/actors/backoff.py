"""The pause before something that fails is started again."""

_LONGEST_SECONDS = 30.0
# beyond about a thousand, a power of two is no float
_MOST_DOUBLINGS = 10


def pause_after(failures: int, first_seconds: float) -> float:
    """Return seconds that double with each failure in a row, up to half a minute."""
    return min(first_seconds * 2 ** min(failures - 1, _MOST_DOUBLINGS), _LONGEST_SECONDS)
