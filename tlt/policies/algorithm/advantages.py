"""Penalise overlong answers, and compute advantages from the rewards of a batch's groups.

`algorithm.advantage`: `group` compares an answer with the mean of its group (GRPO, arXiv
2402.03300), `leave_one_out` with the mean of the others in it (RLOO, 2402.14740). `batch` takes the
mean over the tokens of all answers (REINFORCE++, 2501.03262); `group_batch` does so with what is
left after the group's mean (REINFORCE++-baseline).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tlt.spec.config import AlgorithmSpec


def overlong_penalty(spec: AlgorithmSpec, length: int, limit: int) -> float:
    """Return what an answer loses: nothing before the last tokens, all of it at the limit."""
    last = min(spec.overlong_tokens, limit)
    if last == 0:
        return 0.0
    return spec.overlong_penalty * min(max(1.0 - (limit - length) / last, 0.0), 1.0)


class Scored(NamedTuple):
    """The reward of an answer, and its tokens: in a mean over tokens a long answer weighs more."""

    reward: float
    tokens: int


Groups = Sequence[Sequence[Scored]]
# by group: one advantage for each reward, or None where all of them are zero
Advantages = list[list[float] | None]

_EQUAL, _EPSILON = 1e-8, 1e-6


def compute_advantages(groups: Groups, name: str, normalise: bool) -> Advantages:
    """Return the advantages of groups; `normalise` lets those of a group have a deviation of 1."""
    return _ADVANTAGES[name](groups, normalise)


def agree(rewards: Sequence[float]) -> bool:
    """Return True if a group's rewards are the same, so that it teaches nothing."""
    return _deviation(_centred(rewards)) < _EQUAL


def _group(groups: Groups, normalise: bool) -> Advantages:
    found: Advantages = []
    for group in groups:
        rewards = [answer.reward for answer in group]
        centred = _centred(rewards)
        scale = 1.0 / (_deviation(centred) + _EPSILON) if normalise else 1.0
        found.append(None if agree(rewards) else [scale * c for c in centred])
    return found


def _leave_one_out(groups: Groups, normalise: bool) -> Advantages:
    found: Advantages = []
    for group, advantages in zip(groups, _group(groups, normalise), strict=True):
        others = len(group) / max(1, len(group) - 1)
        found.append(None if advantages is None else [others * a for a in advantages])
    return found


def _batch(groups: Groups, normalise: bool) -> Advantages:
    return _whitened([[answer.reward for answer in group] for group in groups], groups, normalise)


def _group_batch(groups: Groups, normalise: bool) -> Advantages:
    centred = [_centred([answer.reward for answer in group]) for group in groups]
    return _whitened(centred, groups, normalise)


_ADVANTAGES: Mapping[str, Callable[[Groups, bool], Advantages]] = {
    "group": _group,
    "leave_one_out": _leave_one_out,
    "batch": _batch,
    "group_batch": _group_batch,
}


def _whitened(values: Sequence[Sequence[float]], groups: Groups, normalise: bool) -> Advantages:
    """Give the tokens of all answers a mean of 0 and a deviation of 1.

    Each token has its answer's value. A group of zeros alone has no advantages.
    """
    tokens = [answer.tokens for group in groups for answer in group]
    flat = [value for of_group in values for value in of_group]
    count = sum(tokens)
    mean = math.fsum(n * v for n, v in zip(tokens, flat, strict=True)) / max(1, count)
    square = math.fsum(n * (v - mean) ** 2 for n, v in zip(tokens, flat, strict=True))
    deviation = math.sqrt(square / max(1, count - 1))
    scale = 1.0 / (deviation + _EPSILON) if normalise else 1.0
    return [
        [scale * (v - mean) for v in of_group]
        if any(abs(v - mean) > _EQUAL for v in of_group)
        else None
        for of_group in values
    ]


def _centred(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards) if rewards else 0.0
    return [reward - mean for reward in rewards]


def _deviation(centred: Sequence[float]) -> float:
    """Return the sample standard deviation."""
    return math.sqrt(math.fsum(c * c for c in centred) / max(1, len(centred) - 1))
