"""Members learn one drafter and don't wait for each other: they send differences, one merges them.

A member marks where it is, sends its delta since the trunk it stands on, and learns on; once a
trunk has that delta in it, it rebases what came after the mark. Moments never travel.

A delta counts by its share of all lessons since the member's last delta was merged, or since the
trunk that it began from. So members that come together are averaged, each by its lessons; so are
those that come one after the other; and of one alone nothing is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tlt.learn.optimiser import require_alike
from tlt.looks import Look, nothing


@dataclass(frozen=True, kw_only=True, eq=False)
class Mark:
    """A drafter as it was."""

    # `weights.*` and their running `mean.*`, as in a learner's state
    tensors: dict[str, Tensor]
    # behind it, one after the other: what the rates depend on
    updates: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Trunk(Mark):
    """The drafter that all members have in common."""

    # micro-batches in it, those learned side by side included
    lessons: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Delta:
    """What one member learned."""

    tensors: dict[str, Tensor]
    # micro-batches that its optimiser made a step for
    lessons: int
    # those in the first trunk that had the member's last delta in it, or in the one it began from
    known: int


def delta(now: Mark, since: Mark, known: int, look: Look = nothing) -> Delta:
    """`since` is the trunk that the member stands on."""
    require_alike(since.tensors, now.tensors, "drafter's mark")
    tensors: dict[str, Tensor] = {}
    for name, tensor in since.tensors.items():
        look()
        tensors[name] = now.tensors[name] - tensor
    return Delta(tensors=tensors, lessons=now.updates - since.updates, known=known)


def rebased(mark: Mark, since: Mark, onto: Mark, look: Look = nothing) -> Mark:
    """A mark as it would be, had what came after `since` been learned on something else."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in mark.tensors.items():
        look()
        tensors[name] = tensor - since.tensors[name] + onto.tensors[name]
    return Mark(tensors=tensors, updates=mark.updates - since.updates + onto.updates)


def merge(trunk: Trunk, deltas: Sequence[Delta], look: Look = nothing) -> Trunk:
    """In any order."""
    lessons = trunk.lessons + sum(found.lessons for found in deltas)
    tensors = {name: tensor.clone() for name, tensor in trunk.tensors.items()}
    updates = 0.0
    for found in deltas:
        require_alike(tensors, found.tensors, "drafter's delta")
        if found.lessons == 0:
            continue
        share = found.lessons / (lessons - found.known)
        updates += share * found.lessons
        for name, tensor in found.tensors.items():
            look()
            tensors[name].add_(tensor, alpha=share)
    return Trunk(tensors=tensors, updates=trunk.updates + round(updates), lessons=lessons)
