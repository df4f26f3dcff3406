"""Members train one drafter without waiting for each other: they send deltas, one member merges.

A member takes a snapshot, sends its delta since the base it trains on, and goes on training. Once
a base contains that delta, the member rebases what it learned after the snapshot. The optimiser's
moments never travel. The base also says which tokens the drafter can propose: members that began
without one may have chosen others, and follow it.

A delta is weighted by its share of all micro-batches since the member's last delta was merged, or
since the base that it began from. So members are averaged by micro-batches, whether they merge
together or one after the other, and a single member loses nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tlt.base.interrupt_check import CheckInterrupt, never_interrupt
from tlt.trainer.named_tensors import require_same_shapes


@dataclass(frozen=True, kw_only=True, eq=False)
class DrafterSnapshot:
    """A drafter in training, at one moment."""

    # `weights.*` and their running `mean.*`, as in a learner's state
    tensors: dict[str, Tensor]
    # updates behind it in a row, on which the learning rates depend
    updates: int
    # the tokens that it can propose, as in its files; None if it can all
    d2t: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class BaseWeights(DrafterSnapshot):
    """The drafter that all members share."""

    # micro-batches in it, those that members learned at the same time included
    micro_batches: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Delta:
    """The difference that one member learned."""

    tensors: dict[str, Tensor]
    # micro-batches for which its optimiser made a step
    micro_batches: int
    # micro-batches of the first base with the member's last delta, or of the base it began from
    previous_micro_batches: int


def compute_delta(
    now: DrafterSnapshot,
    base: DrafterSnapshot,
    known: int,
    check: CheckInterrupt = never_interrupt,
) -> Delta:
    require_same_shapes(base.tensors, now.tensors, "drafter's snapshot")
    tensors: dict[str, Tensor] = {}
    for name, tensor in base.tensors.items():
        check()
        tensors[name] = now.tensors[name] - tensor
    return Delta(
        tensors=tensors, micro_batches=now.updates - base.updates, previous_micro_batches=known
    )


def rebase_snapshot(
    snapshot: DrafterSnapshot,
    since: DrafterSnapshot,
    onto: DrafterSnapshot,
    check: CheckInterrupt = never_interrupt,
) -> DrafterSnapshot:
    """Move what was learned after `since` onto other weights."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in snapshot.tensors.items():
        check()
        tensors[name] = tensor - since.tensors[name] + onto.tensors[name]
    return DrafterSnapshot(
        tensors=tensors,
        updates=snapshot.updates - since.updates + onto.updates,
        d2t=onto.d2t,
    )


def merge_deltas(
    base: BaseWeights,
    deltas: Iterable[Delta],
    micro_batches: int,
    check: CheckInterrupt = never_interrupt,
) -> BaseWeights:
    """Add the weighted deltas, which have so many micro-batches together, in any order.

    Each is dropped before the next one is read, as they are as large as the base.
    """
    micro_batches += base.micro_batches
    tensors = {name: tensor.clone() for name, tensor in base.tensors.items()}
    updates = 0.0
    for delta in deltas:
        require_same_shapes(tensors, delta.tensors, "drafter's delta")
        if delta.micro_batches == 0:
            continue
        share = delta.micro_batches / (micro_batches - delta.previous_micro_batches)
        updates += share * delta.micro_batches
        _add(tensors, delta, share, check)
        del delta
    return BaseWeights(
        tensors=tensors,
        updates=base.updates + round(updates),
        micro_batches=micro_batches,
        d2t=base.d2t,
    )


def _add(tensors: Mapping[str, Tensor], delta: Delta, share: float, check: CheckInterrupt) -> None:
    for name, tensor in delta.tensors.items():
        check()
        tensors[name].add_(tensor, alpha=share)
