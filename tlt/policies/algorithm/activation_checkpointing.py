"""Decide whether activations are kept for the backward pass or computed again."""

from typing import Literal

# a 3B policy's activations of 8,192 tokens would take over 40 GB, a 0.5B policy's 13
_LEAST_WEIGHTS = 1_000_000_000


def checkpoints_activations(setting: bool | Literal["auto", "offload"], weights: int) -> bool:
    return weights >= _LEAST_WEIGHTS if setting == "auto" else setting is not False
