"""Members learn one drafter and don't wait for each other: they send differences, one merges them.

A member marks where it is, sends its delta since the base it stands on, and learns on; once a
base has that delta in it, it rebases what came after the mark. Moments never travel.

A delta is weighted by its share of all micro-batches since the member's last delta was merged, or
since the base that it began from. So members that merge together are averaged by micro-batches, and
so are those that merge one after the other. A single member loses nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tlt.interrupt import CheckInterrupt, never_interrupt
from tlt.trainer.policy.adamw import require_same_shapes


@dataclass(frozen=True, kw_only=True, eq=False)
class DrafterSnapshot:
    """A drafter as it was."""

    # `weights.*` and their running `mean.*`, as in a learner's state
    tensors: dict[str, Tensor]
    # behind it, one after the other: what the rates depend on
    updates: int


@dataclass(frozen=True, kw_only=True, eq=False)
class BaseWeights(DrafterSnapshot):
    """The drafter that all members have in common."""

    # micro-batches in it, those learned side by side included
    micro_batches: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Delta:
    """What one member learned."""

    tensors: dict[str, Tensor]
    # micro-batches that its optimiser made a step for
    micro_batches: int
    # those in the first base that had the member's last delta in it, or in the one it began from
    known: int


def compute_delta(
    now: DrafterSnapshot,
    since: DrafterSnapshot,
    known: int,
    check: CheckInterrupt = never_interrupt,
) -> Delta:
    """`since` is the base that the member stands on."""
    require_same_shapes(since.tensors, now.tensors, "drafter's mark")
    tensors: dict[str, Tensor] = {}
    for name, tensor in since.tensors.items():
        check()
        tensors[name] = now.tensors[name] - tensor
    return Delta(tensors=tensors, micro_batches=now.updates - since.updates, known=known)


def rebase_snapshot(
    mark: DrafterSnapshot,
    since: DrafterSnapshot,
    onto: DrafterSnapshot,
    check: CheckInterrupt = never_interrupt,
) -> DrafterSnapshot:
    """A mark as it would be, had what came after `since` been learned on something else."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in mark.tensors.items():
        check()
        tensors[name] = tensor - since.tensors[name] + onto.tensors[name]
    return DrafterSnapshot(tensors=tensors, updates=mark.updates - since.updates + onto.updates)


def merge_deltas(
    base: BaseWeights, deltas: Sequence[Delta], check: CheckInterrupt = never_interrupt
) -> BaseWeights:
    """In any order."""
    micro_batches = base.micro_batches + sum(found.micro_batches for found in deltas)
    tensors = {name: tensor.clone() for name, tensor in base.tensors.items()}
    updates = 0.0
    for found in deltas:
        require_same_shapes(tensors, found.tensors, "drafter's delta")
        if found.micro_batches == 0:
            continue
        share = found.micro_batches / (micro_batches - found.known)
        updates += share * found.micro_batches
        for name, tensor in found.tensors.items():
            check()
            tensors[name].add_(tensor, alpha=share)
    return BaseWeights(
        tensors=tensors, updates=base.updates + round(updates), micro_batches=micro_batches
    )
