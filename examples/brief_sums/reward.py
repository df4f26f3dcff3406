"""Reward right and brief answers: 1 at the shortest possible length, 1/2 at twice that length.

A wrong answer gets 0 at any length.
"""

from typing import Any


def brief_and_right(completion: str, answer: str, row: dict[str, Any]) -> float:
    _, marker, given = completion.rpartition("#")
    if not marker or given != answer:
        return 0.0
    return min(1.0, row["enough"] / len(completion))
