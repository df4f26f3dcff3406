"""Members come and go at their own pace; what they learned is neither lost nor counted twice."""

from collections.abc import Sequence
from itertools import permutations

import pytest
import torch
from torch import Tensor

from tests.trainer.drafters import learner, samples, whole
from tests.trainer.models import copies
from tlt.errors import ConfigError
from tlt.trainer.drafter.delta_merging import (
    BaseWeights,
    Delta,
    DrafterSnapshot,
    compute_delta,
    merge_deltas,
)
from tlt.trainer.drafter.drafter_learner import DrafterLearner
from tlt.trainer.drafter.micro_batches import DrafterBatch

STEPS = 2


def micro_batches(count: int, seed: int = 0) -> list[DrafterBatch]:
    return [whole(samples("eagle", 3, seed * 100 + n), STEPS) for n in range(count)]


def trunk() -> BaseWeights:
    """After some lessons."""
    learns = learner("eagle")
    for lesson in micro_batches(4, seed=9):
        learns.learn(lesson)
    mark = learns.snapshot()
    return BaseWeights(tensors=mark.tensors, updates=mark.updates, micro_batches=mark.updates)


def member(on: BaseWeights) -> DrafterLearner:
    learns = learner("eagle")
    learns.rebase(learns.snapshot(), on)
    return learns


def learned(learns: DrafterLearner, chosen: Sequence[DrafterBatch]) -> DrafterLearner:
    for lesson in chosen:
        learns.learn(lesson)
    return learns


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_one_member_that_merges_is_one_that_goes_on():
    start = trunk()
    steady, merging = member(start), member(start)
    learned(steady, micro_batches(9))
    base = start
    for first in (0, 3, 6):
        learned(merging, micro_batches(9)[first : first + 3])
        mark = merging.snapshot()
        base = merge_deltas(base, [compute_delta(mark, base, base.micro_batches)])
        merging.rebase(mark, base)
    same(merging.state(), steady.state())
    same(base.tensors, steady.snapshot().tensors)
    assert base.updates == steady.updates == 13
    assert base.micro_batches == 13


def three(start: BaseWeights, counts: Sequence[int]) -> list[Delta]:
    return [
        compute_delta(
            learned(member(start), micro_batches(count, seed)).snapshot(),
            start,
            start.micro_batches,
        )
        for seed, count in enumerate(counts)
    ]


def test_members_that_come_together_are_averaged_by_their_lessons_in_any_order():
    start = trunk()
    deltas = three(start, (4, 2, 2))
    merged = merge_deltas(start, deltas)
    for name, tensor in start.tensors.items():
        parts = [
            share * found.tensors[name] for share, found in zip((2, 1, 1), deltas, strict=True)
        ]
        torch.testing.assert_close(merged.tensors[name], tensor + torch.stack(parts).sum(0) / 4)
    # 4 and a half in one row: 2 + 0.5 + 0.5
    assert merged.updates == start.updates + 3
    assert merged.micro_batches == start.micro_batches + 8
    for order in permutations(deltas):
        again = merge_deltas(start, order)
        same(again.tensors, merged.tensors)
        assert (again.updates, again.micro_batches) == (merged.updates, merged.micro_batches)


def test_who_comes_late_counts_no_more_than_side_by_side():
    start = trunk()
    first, second, third = three(start, (3, 3, 3))
    late = merge_deltas(merge_deltas(merge_deltas(start, [first]), [second]), [third])
    for name, tensor in start.tensors.items():
        expected = tensor + first.tensors[name] + second.tensors[name] / 2 + third.tensors[name] / 3
        torch.testing.assert_close(late.tensors[name], expected)
    assert late.micro_batches == merge_deltas(start, [first, second, third]).micro_batches


def test_work_that_was_rebased_counts_no_more_than_it_did():
    start = trunk()
    slow = learned(member(start), micro_batches(2))
    mark = slow.snapshot()
    merged = merge_deltas(start, [compute_delta(mark, start, start.micro_batches)])
    known = merged.micro_batches
    learned(slow, micro_batches(2, seed=1))
    merged = merge_deltas(merged, three(merged, (6,)))
    slow.rebase(mark, merged)
    late = compute_delta(slow.snapshot(), merged, known)
    assert late.micro_batches == 2
    again = merge_deltas(merged, [late])
    for name, tensor in merged.tensors.items():
        torch.testing.assert_close(again.tensors[name], tensor + late.tensors[name] / 4)


def test_a_rebase_keeps_what_was_not_merged_yet_and_the_moments():
    start = trunk()
    learns = learned(member(start), micro_batches(2))
    mark = learns.snapshot()
    learned(learns, micro_batches(3, seed=1))
    before, state = learns.snapshot(), copies(learns.state())
    merged = merge_deltas(
        start, [compute_delta(mark, start, start.micro_batches), *three(start, (2,))]
    )
    learns.rebase(mark, merged)
    for name, tensor in learns.snapshot().tensors.items():
        own = before.tensors[name] - mark.tensors[name]
        torch.testing.assert_close(tensor, merged.tensors[name] + own)
    assert learns.updates == merged.updates + 3
    for name, tensor in learns.state().items():
        if name.startswith("optimiser."):
            assert torch.equal(tensor, state[name]), name


def test_who_learned_nothing_changes_nothing():
    start = trunk()
    merged = merge_deltas(
        start, [compute_delta(member(start).snapshot(), start, start.micro_batches)]
    )
    same(merged.tensors, start.tensors)
    assert (merged.updates, merged.micro_batches) == (start.updates, start.micro_batches)


def test_what_does_not_fit_is_refused_by_name():
    start, other = trunk(), learner("eagle3")
    with pytest.raises(ConfigError, match=r"snapshot has an unknown mean.midlayer|snapshot lacks"):
        compute_delta(other.snapshot(), start, start.micro_batches)
    with pytest.raises(ConfigError, match="base lacks"):
        other.rebase(other.snapshot(), start)
    name = "weights.fc.weight"
    narrow = DrafterSnapshot(tensors={**start.tensors, name: torch.zeros(2, 2)}, updates=1)
    with pytest.raises(ConfigError, match=r"fc.weight of shape \(2, 2\)"):
        compute_delta(narrow, start, start.micro_batches)
    with pytest.raises(ConfigError, match=r"fc.weight of shape \(2, 2\)"):
        merge_deltas(
            start, [Delta(tensors=narrow.tensors, micro_batches=1, known=start.micro_batches)]
        )
