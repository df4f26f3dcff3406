"""A member's work is added to the bases once, in any order of merges."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from tests.trainer.drafters import keep, learner, samples, whole
from tlt.base.id_types import Digest, DrafterVersion
from tlt.base.interrupt_check import CheckInterrupt, Interrupted
from tlt.protocol.refs import BlobRef, DrafterBase
from tlt.ranks.drafter.merged_delta_tracker import DeltaTracker
from tlt.trainer.drafter.delta_merging import BaseWeights, Delta, merge_deltas

_Found = TypeVar("_Found")
NAME = "1.0"
BLOB = BlobRef(digest=Digest("any"), bytes=0)


def new_tracker() -> DeltaTracker:
    found = DeltaTracker(NAME, learner("eagle"))
    found.move_to(ref(0, found.root), found.root)
    return found


def ref(version: int, base: BaseWeights, root: int = 0, number: int | None = None) -> DrafterBase:
    return DrafterBase(
        version=DrafterVersion(version),
        root=DrafterVersion(root),
        weights=BLOB,
        updates=base.updates,
        micro_batches=base.micro_batches,
        merged={} if number is None else {NAME: (number, base.micro_batches)},
    )


def learn(found: DeltaTracker, seed: int) -> None:
    found.learner.learn(whole(samples("eagle", 3, seed), 2))


def weights(found: DeltaTracker) -> Mapping[str, Tensor]:
    return found.learner.snapshot().tensors


def merge(base: BaseWeights, deltas: Sequence[Delta]) -> BaseWeights:
    return merge_deltas(base, iter(deltas), sum(delta.micro_batches for delta in deltas))


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def round_off(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], delta: Delta) -> None:
    """Require equal tensors, but for what the delta's format leaves out."""
    for name, tensor in expected.items():
        left = (tensor - found[name]).abs()
        assert (left <= 2**-8 * delta.tensors[name].double().abs() + 1e-9).all(), name


def test_delta_holds_all_work_that_no_base_has() -> None:
    one = new_tracker()
    learn(one, 1)
    first = one.take_delta(0, keep)
    learn(one, 2)
    second = one.take_delta(1, keep)
    assert (first.micro_batches, second.micro_batches) == (1, 2)
    merged = merge(one.root, [second])
    round_off(merged.tensors, weights(one), second)


def test_next_delta_holds_the_work_done_during_a_merge() -> None:
    one, alone = new_tracker(), new_tracker()
    for seed in (1, 2, 3, 4):
        learn(alone, seed)
    learn(one, 1)
    delta = one.take_delta(0, keep)
    learn(one, 2)
    one.take_delta(1, keep)  # never merged
    learn(one, 3)
    base = merge(one.root, [delta])
    one.move_to(ref(1, base, number=0), base)
    learn(one, 4)
    last = one.take_delta(2, keep)
    assert last.micro_batches == 3
    round_off(merge(base, [last]).tensors, weights(alone), last)


def test_next_delta_holds_what_the_format_of_the_last_one_left_out() -> None:
    """Deltas are in bfloat16, and no rounding adds up."""
    one, alone = new_tracker(), new_tracker()
    base, deltas = one.root, list[Delta]()
    for number in range(12):
        learn(alone, number)
        learn(one, number)
        deltas.append(one.take_delta(number, keep))
        base = merge(base, deltas[-1:])
        one.move_to(ref(number + 1, base, number=number), base)
    assert {tensor.dtype for tensor in deltas[-1].tensors.values()} == {torch.bfloat16}
    same(weights(one), weights(alone))
    round_off(base.tensors, weights(alone), deltas[-1])


def test_a_merge_without_its_delta_keeps_a_members_work() -> None:
    """The delta may be merged after the member moved to a base without it."""
    one, other = new_tracker(), new_tracker()
    learn(one, 1)
    learn(other, 7)
    mine, theirs = one.take_delta(0, keep), other.take_delta(0, keep)
    first = merge(one.root, [theirs])
    one.move_to(ref(1, first), first)
    learn(one, 2)
    second = merge(first, [mine])
    one.move_to(ref(2, second, number=0), second)
    left = one.take_delta(1, keep)
    assert left.micro_batches == 1
    rest = {name: tensor - second.tensors[name] for name, tensor in weights(one).items()}
    round_off(left.tensors, rest, left)


def interrupted(work: Callable[[CheckInterrupt], _Found]) -> _Found:
    """Interrupt the work at its first check, then at its second, and so on until it completes."""
    for most in count():
        checks = 0

        def check(most: int = most) -> None:
            nonlocal checks
            checks += 1
            if checks > most:
                raise Interrupted

        try:
            found = work(check)
        except Interrupted:
            continue
        assert checks > 5
        return found
    raise AssertionError


@pytest.mark.parametrize("root", [0, 5])
def test_interrupt_changes_nothing(root: int) -> None:
    one, undisturbed, other = new_tracker(), new_tracker(), new_tracker()
    learn(other, 7)
    theirs = other.take_delta(0, keep)
    for found in (one, undisturbed):
        learn(found, 1)
    mine = interrupted(lambda check: one.take_delta(0, keep, check))
    same(mine.tensors, undisturbed.take_delta(0, keep).tensors)
    for found in (one, undisturbed):
        learn(found, 2)
        found.take_delta(1, keep)
        learn(found, 3)
    base = merge(one.root, [mine, theirs])
    standing = ref(6, base, root=root, number=0)
    assert one.is_known(standing) == (root == 0)
    interrupted(lambda check: one.move_to(standing, base, check))
    undisturbed.move_to(standing, base)
    same(weights(one), weights(undisturbed))
    learn(one, 4)
    learn(undisturbed, 4)
    ours, expected = (
        interrupted(lambda check: one.take_delta(2, keep, check)),
        undisturbed.take_delta(2, keep),
    )
    assert (ours.micro_batches, ours.previous_micro_batches) == (
        expected.micro_batches,
        expected.previous_micro_batches,
    )
    same(ours.tensors, expected.tensors)


def test_new_lineage_keeps_no_work_of_the_old_one() -> None:
    one = new_tracker()
    learn(one, 1)
    one.take_delta(0, keep)
    learn(one, 2)
    fresh = new_tracker()
    learn(fresh, 9)
    snapshot = fresh.learner.snapshot()
    used = BaseWeights(
        tensors=snapshot.tensors, updates=snapshot.updates, micro_batches=snapshot.updates
    )
    one.move_to(ref(5, used, root=5), used)
    same(weights(one), used.tensors)
    assert one.take_delta(1, keep).micro_batches == 0


def test_loses_work_since_a_forgotten_snapshot() -> None:
    one = new_tracker()
    learn(one, 1)
    first = one.take_delta(0, keep)
    for number in range(1, 20):
        learn(one, number)
        one.take_delta(number, keep)
    base = merge(one.root, [first])
    one.move_to(ref(1, base, number=0), base)
    same(weights(one), base.tensors)


def test_keeps_fewer_snapshots_of_large_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.ranks.drafter.merged_delta_tracker.SNAPSHOT_BYTES", 1)
    for published, known in ((4, True), (5, False)):
        one = new_tracker()
        deltas: list[Delta] = []
        for number in range(published):
            learn(one, number)
            deltas.append(one.take_delta(number, keep))
        base = merge(one.root, deltas[:1])
        one.move_to(ref(1, base, number=0), base)
        assert one.take_delta(published, keep).micro_batches == (published - 1 if known else 0)


def test_a_member_that_begins_from_a_base_counts_from_it() -> None:
    one, late = new_tracker(), new_tracker()
    learn(one, 1)
    base = merge(one.root, [one.take_delta(0, keep)])
    late.move_to(ref(1, base), base)
    learn(late, 2)
    added: Delta = late.take_delta(0, keep)
    assert (added.micro_batches, added.previous_micro_batches) == (1, base.micro_batches)


def test_follows_the_tokens_of_the_base() -> None:
    found = DeltaTracker(NAME, learner("eagle", hot_tokens=12))
    found.move_to(ref(0, found.root), found.root)
    learn(found, 1)
    base = merge(found.root, [found.take_delta(0, keep)])
    assert base.d2t is not None
    assert found.root.d2t is not None
    assert torch.equal(base.d2t, found.root.d2t)
    other = replace(base, d2t=base.d2t + 1)
    found.move_to(ref(1, other, number=0), other)
    tokens = found.learner.drafter().tokens
    assert tokens is not None
    assert tokens.tolist() == list(range(1, 24, 2))
