"""Check the reward that code of the user's returned."""

from typing import Any

from tlt.base.id_types import LARGEST
from tlt.environments.environment_messages import Observation


def reward_of(found: Any) -> Observation:
    """Return the reward, none for None, or why it is no number."""
    if found is None:
        return Observation()
    reward = float(found)
    if not abs(reward) <= LARGEST:  # NaN isn't either
        return Observation(error=f"the reward is {reward}")
    return Observation(reward=reward)
