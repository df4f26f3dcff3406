"""Penalise overlong answers, and compute advantages from the rewards of a batch's groups.

`algorithm.advantage`: `group` compares an answer with the mean of its group (GRPO, arXiv
2402.03300), `leave_one_out` with the mean of the others in it (RLOO, 2402.14740), `batch` with the
mean of all answers (REINFORCE++, 2501.03262). `group_batch` is REINFORCE++-baseline: less the
group's mean, by the deviation of all.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from tlt.spec.config import AlgorithmSpec


def overlong_penalty(spec: AlgorithmSpec, length: int, limit: int) -> float:
    """Return what an answer loses: nothing before the last tokens, all of it at the limit."""
    if spec.overlong_tokens == 0:
        return 0.0
    beyond = length - (limit - spec.overlong_tokens)
    return spec.overlong_penalty * min(max(beyond / spec.overlong_tokens, 0.0), 1.0)


Groups = Sequence[Sequence[float]]
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
    for rewards in groups:
        centred = _centred(rewards)
        deviation = _deviation(centred)
        if agree(rewards):
            found.append(None)
        else:
            found.append([c / (deviation + _EPSILON) for c in centred] if normalise else centred)
    return found


def _leave_one_out(groups: Groups, normalise: bool) -> Advantages:
    found: Advantages = []
    for rewards, advantages in zip(groups, _group(groups, normalise), strict=True):
        others = len(rewards) / max(1, len(rewards) - 1)
        found.append(None if advantages is None else [others * a for a in advantages])
    return found


def _batch(groups: Groups, normalise: bool) -> Advantages:
    centred = iter(_centred([reward for rewards in groups for reward in rewards]))
    return _over_batch([[next(centred) for _ in rewards] for rewards in groups], normalise)


def _group_batch(groups: Groups, normalise: bool) -> Advantages:
    return _over_batch([_centred(rewards) for rewards in groups], normalise)


_ADVANTAGES: Mapping[str, Callable[[Groups, bool], Advantages]] = {
    "group": _group,
    "leave_one_out": _leave_one_out,
    "batch": _batch,
    "group_batch": _group_batch,
}


def _over_batch(centred: Groups, normalise: bool) -> Advantages:
    """Divide by the deviation of all; a group of zeros alone has no advantages."""
    deviation = _deviation([c for each in centred for c in each])
    scale = 1.0 / (deviation + _EPSILON) if normalise else 1.0
    return [
        [scale * c for c in each] if any(abs(c) > _EQUAL for c in each) else None
        for each in centred
    ]


def _centred(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards) if rewards else 0.0
    return [reward - mean for reward in rewards]


def _deviation(centred: Sequence[float]) -> float:
    return math.sqrt(math.fsum(c * c for c in centred) / len(centred)) if centred else 0.0
