"""Compute group-relative advantages: an answer's score less the mean score of its group."""

import math
from collections.abc import Sequence


def group_advantages(rewards: Sequence[float], normalise: bool) -> list[float] | None:
    """Return None if all answers scored the same: such a group teaches nothing."""
    if len(rewards) < 2:
        return None
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    deviation = math.sqrt(math.fsum(c * c for c in centred) / len(rewards))
    if deviation < 1e-8:
        return None
    return [c / (deviation + 1e-6) for c in centred] if normalise else centred
