"""Read figures from TensorBoard's files."""

from collections import Counter
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader


def points(run: Path) -> Counter[tuple[str, int]]:
    """Return how often each figure of each step was written."""
    found: Counter[tuple[str, int]] = Counter()
    for file in (run / "tensorboard").glob("*"):
        for event in EventFileLoader(str(file)).Load():
            found.update((value.tag, event.step) for value in event.summary.value)
    return found
