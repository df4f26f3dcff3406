"""Make the answers from a seed that TRL, verl and TLT compute a loss of, with plain Python."""

import math
import random
from dataclasses import dataclass

SEED, VOCABULARY = 20, 4
# answers of each group; one of one token in most, and the limit is reached
LENGTHS = ((1, 4, 6), (2, 5, 3), (6, 1, 4), (3, 2, 5), (4, 6, 2))
LIMIT = 6
# in the third group all answers are right
REWARDS = ((1.0, 0.0, 0.0), (1.0, 0.5, -0.25), (1.0, 1.0, 1.0), (0.0, 0.1, 1.0), (1.0, 0.0, 0.0))
# for losses that are compared without their advantages
ADVANTAGES = (1.2, -0.6, -0.7, 1.0, 0.2, -1.1, 0.4, -0.5, 0.8, -0.9, -0.3, 1.1, 1.3, -0.7, -0.6)

# by turns, what an answer's tokens are drawn between, and what is added to the last: the logs of
# learner over old, and of old over sampler
_Profiles = tuple[tuple[float, float, float], ...]
_RATIOS: _Profiles = (
    (-1e-4, 1e-4, 0.0),
    (-0.1, 0.1, 0.0),
    (-0.8, 0.8, 0.0),
    (-0.3, 0.3, 2.3),
    (-0.3, 0.3, -1.6),
)
_GAPS: _Profiles = (
    (-0.1, 0.1, 1.5),
    (-0.6, -0.3, 0.0),
    (-0.1, 0.1, -1.5),
    (-1e-4, 1e-4, 0.0),
    (0.3, 0.6, 0.0),
    (-0.1, 0.1, 0.0),
)


@dataclass(frozen=True)
class Inputs:
    """One entry per token, in the order of the answers; `rewards` has one per answer."""

    groups: int
    lengths: tuple[int, ...]
    rewards: tuple[float, ...]
    advantages: tuple[float, ...]
    logits: tuple[tuple[float, ...], ...]
    tokens: tuple[int, ...]
    old: tuple[float, ...]
    sampler: tuple[float, ...]
    reference: tuple[float, ...]

    @property
    def group_size(self) -> int:
        return len(self.lengths) // self.groups


def make_inputs(seed: int = SEED) -> Inputs:
    rng = random.Random(seed)
    lengths = [length for group in LENGTHS for length in group]
    logits = [tuple(rng.uniform(-1, 1) for _ in range(VOCABULARY)) for _ in range(sum(lengths))]
    tokens = [rng.randrange(VOCABULARY) for _ in logits]
    current = [_logprob(row, token) for row, token in zip(logits, tokens, strict=True)]
    old = _less(current, _deviations(rng, lengths, _RATIOS))
    return Inputs(
        groups=len(LENGTHS),
        lengths=tuple(lengths),
        rewards=tuple(reward for group in REWARDS for reward in group),
        advantages=ADVANTAGES,
        logits=tuple(logits),
        tokens=tuple(tokens),
        old=old,
        sampler=_less(old, _deviations(rng, lengths, _GAPS)),
        reference=_less(old, [rng.uniform(-0.8, 0.8) for _ in old]),
    )


def _logprob(row: tuple[float, ...], token: int) -> float:
    return row[token] - math.log(math.fsum(map(math.exp, row)))


def _less(values: tuple[float, ...] | list[float], amounts: list[float]) -> tuple[float, ...]:
    return tuple(value - amount for value, amount in zip(values, amounts, strict=True))


def _deviations(rng: random.Random, lengths: list[int], profiles: _Profiles) -> list[float]:
    found: list[float] = []
    for index, length in enumerate(lengths):
        low, high, spike = profiles[index % len(profiles)]
        found += [rng.uniform(low, high) for _ in range(length)]
        found[-1] += spike
    return found
