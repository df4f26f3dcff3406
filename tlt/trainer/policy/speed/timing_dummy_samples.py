"""Samples with meaningless tokens and lengths as in a step, on which speed is measured."""

import random
from collections.abc import Iterable

from tlt.trainer.policy.model.samples import PolicySample


def make_dummy_samples(lengths: Iterable[int], vocabulary: int) -> list[PolicySample]:
    """Reward half of them, so that gradients nearly cancel and rounding errors show."""
    rng = random.Random(0)
    return [
        PolicySample(
            prompt=(0,),
            completion=[rng.randrange(vocabulary) for _ in range(length - 1)],
            logprobs=(0.0,) * (length - 1),
            temperature=1.0,
            advantage=1.0 if index % 2 else -1.0,
        )
        for index, length in enumerate(lengths)
        if length > 1
    ]
