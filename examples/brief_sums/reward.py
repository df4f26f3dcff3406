"""Right and brief: 1 for the right answer in as few characters as are enough, 1/2 in twice as many.

A wrong answer is worth nothing, however brief.
"""

from typing import Any


def brief_and_right(completion: str, answer: str, row: dict[str, Any]) -> float:
    _, marker, given = completion.rpartition("#")
    if not marker or given != answer:
        return 0.0
    return min(1.0, row["enough"] / len(completion))
