"""Members train one drafter without waiting for each other: they send deltas, one member merges.

A member takes a snapshot, sends its delta since the base it trains on, and goes on training. Once
a base contains that delta, the member rebases what it learned after the snapshot. The optimiser's
moments never travel. The base also says which tokens the drafter can propose: members that began
without one may have chosen others, and follow it. Deltas are in bfloat16, half as large as the
weights; what their rounding leaves out stays with the member, and is in its next delta.

A delta is weighted by its share of all micro-batches since the member's last delta was merged, or
since the base that it began from. So members are averaged by micro-batches, whether they merge
together or one after the other, and a single member loses nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from tlt.base.interrupt_check import CheckInterrupt, never_interrupt
from tlt.models.weight_leaves import Layout, Piece, flatten
from tlt.trainer.named_tensors import require_same_shapes

# stores tensors by their layout and pieces, and returns them
Store = Callable[[Layout, Iterator[Piece]], Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True, eq=False)
class DrafterSnapshot:
    """A drafter in training, at one moment."""

    # `weights.*` and their running `mean.*`, as in a learner's state
    tensors: Mapping[str, Tensor]
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

    tensors: Mapping[str, Tensor]
    # micro-batches for which its optimiser made a step
    micro_batches: int
    # micro-batches of the first base with the member's last delta, or of the base it began from
    previous_micro_batches: int


class _Sums(Mapping[str, Tensor]):
    """Tensors and what was added to them, as sums that are computed whenever they are read."""

    def __init__(self, tensors: Mapping[str, Tensor], added: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._added = added

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name] + self._added[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def compute_delta(
    now: DrafterSnapshot,
    base: DrafterSnapshot,
    known: int,
    store: Store,
    check: CheckInterrupt = never_interrupt,
) -> Delta:
    """Return the differences as `store` has stored them."""
    require_same_shapes(base.tensors, now.tensors, "drafter's snapshot")
    layout = Layout({name: (tensor.shape, torch.bfloat16) for name, tensor in base.tensors.items()})
    return Delta(
        tensors=store(layout, _differences(layout, now.tensors, base.tensors, check)),
        micro_batches=now.updates - base.updates,
        previous_micro_batches=known,
    )


def _differences(
    layout: Layout, now: Mapping[str, Tensor], base: Mapping[str, Tensor], check: CheckInterrupt
) -> Iterator[Piece]:
    for name, cuts in groupby(layout.cuts(), lambda cut: cut.name):
        check()
        after, before = flatten(now[name]), flatten(base[name])
        for cut in cuts:
            part = slice(cut.begin, cut.end)
            yield partial(_subtract, after[part], before[part])


def _subtract(after: Tensor, before: Tensor) -> Tensor:
    return after - before.to(after.device)


def add_delta(base: DrafterSnapshot, delta: Delta, d2t: Tensor | None) -> DrafterSnapshot:
    """Return what the delta leads to; its tensors are computed whenever they are read."""
    return DrafterSnapshot(
        tensors=_Sums(base.tensors, delta.tensors),
        updates=base.updates + delta.micro_batches,
        d2t=d2t,
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
