"""A reward function for `benchmarks.soak`, which runs in a child of the reward scorer."""

from typing import Any


def right(completion: str, answer: str, row: dict[str, Any]) -> float:
    _, marker, given = completion.rpartition("#")
    return float(bool(marker) and given == answer)
