"""Samples as a step has them, to measure on: their tokens mean nothing."""

import random
from collections.abc import Iterable

from tlt.trainer.policy.samples import PolicySample


def make_dummy_samples(lengths: Iterable[int], vocabulary: int) -> list[PolicySample]:
    """Half of them rewarded: what is left when gradients cancel is what rounding shows in."""
    dice = random.Random(0)
    return [
        PolicySample(
            prompt=(0,),
            completion=[dice.randrange(vocabulary) for _ in range(length - 1)],
            logprobs=(0.0,) * (length - 1),
            temperature=1.0,
            advantage=1.0 if index % 2 else -1.0,
        )
        for index, length in enumerate(lengths)
        if length > 1
    ]
