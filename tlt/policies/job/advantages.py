"""Group-relative advantages: an answer is as good as it is better than its siblings."""

import math
from collections.abc import Sequence


def group_advantages(rewards: Sequence[float], normalise: bool) -> list[float] | None:
    """None where all answers scored the same: such a group has nothing to teach."""
    if len(rewards) < 2:
        return None
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    deviation = math.sqrt(math.fsum(c * c for c in centred) / len(rewards))
    if deviation < 1e-8:
        return None
    return [c / (deviation + 1e-6) for c in centred] if normalise else centred
