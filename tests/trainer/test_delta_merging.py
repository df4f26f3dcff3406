"""Merging loses and repeats no work of members that train at different speeds."""

from collections.abc import Mapping, Sequence
from itertools import permutations

import pytest
import torch
from torch import Tensor

from tests.trainer.drafters import keep, learner, samples, whole
from tests.trainer.models import copies
from tlt.errors import ConfigError
from tlt.trainer.drafter.delta_merging import (
    BaseWeights,
    Delta,
    DrafterSnapshot,
    add_delta,
    compute_delta,
    merge_deltas,
)
from tlt.trainer.drafter.drafter_learner import DrafterLearner
from tlt.trainer.drafter.micro_batches import DrafterBatch

STEPS = 2


def merge(base: BaseWeights, deltas: Sequence[Delta]) -> BaseWeights:
    return merge_deltas(base, iter(deltas), sum(delta.micro_batches for delta in deltas))


def delta_of(now: DrafterSnapshot, base: DrafterSnapshot, known: int) -> Delta:
    return compute_delta(now, base, known, keep)


def micro_batches(count: int, seed: int = 0) -> list[DrafterBatch]:
    return [whole(samples("eagle", 3, seed * 100 + n), STEPS) for n in range(count)]


def base_weights() -> BaseWeights:
    """Return base weights after some micro-batches."""
    learns = learner("eagle")
    for micro_batch in micro_batches(4, seed=9):
        learns.learn(micro_batch)
    snapshot = learns.snapshot()
    return BaseWeights(
        tensors=snapshot.tensors, updates=snapshot.updates, micro_batches=snapshot.updates
    )


def member(on: BaseWeights) -> DrafterLearner:
    learns = learner("eagle")
    learns.rebase(learns.snapshot(), on)
    return learns


def learned(learns: DrafterLearner, chosen: Sequence[DrafterBatch]) -> DrafterLearner:
    for micro_batch in chosen:
        learns.learn(micro_batch)
    return learns


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_single_member_loses_nothing_by_merging():
    start = base_weights()
    steady, merging = member(start), member(start)
    learned(steady, micro_batches(9))
    base = start
    for first in (0, 3, 6):
        learned(merging, micro_batches(9)[first : first + 3])
        delta = delta_of(merging.snapshot(), base, base.micro_batches)
        published = add_delta(base, delta, None)
        base = merge(base, [delta])
        merging.rebase(published, base)
    same(merging.state(), steady.state())
    for name, tensor in steady.snapshot().tensors.items():
        left = (tensor - base.tensors[name]).abs()
        assert (left <= 2**-8 * delta.tensors[name].abs() + 1e-9).all(), name
    assert base.updates == steady.updates == 13
    assert base.micro_batches == 13


def three(start: BaseWeights, counts: Sequence[int]) -> list[Delta]:
    return [
        delta_of(
            learned(member(start), micro_batches(count, seed)).snapshot(),
            start,
            start.micro_batches,
        )
        for seed, count in enumerate(counts)
    ]


def test_averages_members_by_micro_batches_in_any_order():
    start = base_weights()
    deltas = three(start, (4, 2, 2))
    merged = merge(start, deltas)
    for name, tensor in start.tensors.items():
        parts = [
            share * found.tensors[name].double()
            for share, found in zip((2, 1, 1), deltas, strict=True)
        ]
        torch.testing.assert_close(merged.tensors[name], tensor + torch.stack(parts).sum(0) / 4)
    # updates in a row: 2 + 0.5 + 0.5
    assert merged.updates == start.updates + 3
    assert merged.micro_batches == start.micro_batches + 8
    for order in permutations(deltas):
        again = merge(start, order)
        same(again.tensors, merged.tensors)
        assert (again.updates, again.micro_batches) == (merged.updates, merged.micro_batches)


def test_late_delta_counts_like_a_simultaneous_one():
    start = base_weights()
    first, second, third = three(start, (3, 3, 3))
    late = merge(merge(merge(start, [first]), [second]), [third])
    for name, tensor in start.tensors.items():
        one, two, last = (each.tensors[name].double() for each in (first, second, third))
        expected = tensor + one + two / 2 + last / 3
        torch.testing.assert_close(late.tensors[name], expected)
    assert late.micro_batches == merge(start, [first, second, third]).micro_batches


def test_rebased_delta_keeps_its_weight():
    start = base_weights()
    slow = learned(member(start), micro_batches(2))
    snapshot = slow.snapshot()
    merged = merge(start, [delta_of(snapshot, start, start.micro_batches)])
    known = merged.micro_batches
    learned(slow, micro_batches(2, seed=1))
    merged = merge(merged, three(merged, (6,)))
    slow.rebase(snapshot, merged)
    late = delta_of(slow.snapshot(), merged, known)
    assert late.micro_batches == 2
    again = merge(merged, [late])
    for name, tensor in merged.tensors.items():
        torch.testing.assert_close(again.tensors[name], tensor + late.tensors[name] / 4)


def test_rebase_keeps_unmerged_learning_and_moments():
    start = base_weights()
    learns = learned(member(start), micro_batches(2))
    snapshot = learns.snapshot()
    learned(learns, micro_batches(3, seed=1))
    before, state = learns.snapshot(), copies(learns.state())
    merged = merge(start, [delta_of(snapshot, start, start.micro_batches), *three(start, (2,))])
    learns.rebase(snapshot, merged)
    for name, tensor in learns.snapshot().tensors.items():
        own = before.tensors[name] - snapshot.tensors[name]
        torch.testing.assert_close(tensor, merged.tensors[name] + own)
    assert learns.updates == merged.updates + 3
    for name, tensor in learns.state().items():
        if name.startswith("optimiser."):
            assert torch.equal(tensor, state[name]), name


def test_empty_delta_changes_nothing():
    start = base_weights()
    merged = merge(start, [delta_of(member(start).snapshot(), start, start.micro_batches)])
    same(merged.tensors, start.tensors)
    assert (merged.updates, merged.micro_batches) == (start.updates, start.micro_batches)


def test_refuses_other_shapes_by_name():
    start, other = base_weights(), learner("eagle3")
    with pytest.raises(ConfigError, match=r"snapshot has an unknown mean.midlayer|snapshot lacks"):
        delta_of(other.snapshot(), start, start.micro_batches)
    with pytest.raises(ConfigError, match="base lacks"):
        other.rebase(other.snapshot(), start)
    name = "weights.fc.weight"
    narrow = DrafterSnapshot(tensors={**start.tensors, name: torch.zeros(2, 2)}, updates=1)
    with pytest.raises(ConfigError, match=r"fc.weight of shape \(2, 2\)"):
        delta_of(narrow, start, start.micro_batches)
    with pytest.raises(ConfigError, match=r"fc.weight of shape \(2, 2\)"):
        merge(
            start,
            [
                Delta(
                    tensors=narrow.tensors,
                    micro_batches=1,
                    previous_micro_batches=start.micro_batches,
                )
            ],
        )
