"""The learning rate depends on the step's number alone, so a resumed job continues it."""

import math

from tlt.spec.config import AlgorithmSpec


def learning_rate(spec: AlgorithmSpec, step: int) -> float:
    """Count `step` from 0; neither the first nor the last of `spec.steps` has a rate of zero."""
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    remaining = max(1, spec.steps - spec.warmup_steps)
    progress = min(1.0, (step - spec.warmup_steps) / remaining)
    match spec.schedule:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1.0 - progress
        case "cosine":
            factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    return spec.learning_rate * factor
