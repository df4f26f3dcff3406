"""What a member learns gets into the trunks once, whatever was merged between its deltas."""

from collections.abc import Callable
from itertools import count
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from tests.trainer.drafters import learner, samples, whole
from tlt.ids import Digest, DrafterVersion
from tlt.interrupt import CheckInterrupt, Interrupted
from tlt.protocol.refs import BlobRef, DrafterBase
from tlt.ranks.delta_tracker import DeltaTracker
from tlt.trainer.drafter.delta_merging import BaseWeights, Delta, merge_deltas

_Found = TypeVar("_Found")
NAME = "1.0"
BLOB = BlobRef(digest=Digest("any"), bytes=0)


def member() -> DeltaTracker:
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


def weights(found: DeltaTracker) -> dict[str, Tensor]:
    return found.learner.snapshot().tensors


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_delta_holds_all_that_no_trunk_has() -> None:
    one = member()
    learn(one, 1)
    first = one.take_delta(0)
    learn(one, 2)
    second = one.take_delta(1)
    assert (first.micro_batches, second.micro_batches) == (1, 2)
    merged = merge_deltas(one.root, [second])
    same(merged.tensors, weights(one))


def test_what_was_learned_during_a_merge_comes_with_the_next_delta() -> None:
    one, alone = member(), member()
    for seed in (1, 2, 3, 4):
        learn(alone, seed)
    learn(one, 1)
    asked = one.take_delta(0)
    learn(one, 2)
    one.take_delta(1)  # which nobody merges
    learn(one, 3)
    base = merge_deltas(one.root, [asked])
    one.move_to(ref(1, base, number=0), base)
    learn(one, 4)
    last = one.take_delta(2)
    assert last.micro_batches == 3
    same(merge_deltas(base, [last]).tensors, weights(alone))


def test_a_merge_of_others_keeps_what_this_one_has_handed_in() -> None:
    """Its delta may be merged only after it has moved on to a trunk without it."""
    one, other = member(), member()
    learn(one, 1)
    learn(other, 7)
    mine, theirs = one.take_delta(0), other.take_delta(0)
    first = merge_deltas(one.root, [theirs])
    one.move_to(ref(1, first), first)
    learn(one, 2)
    second = merge_deltas(first, [mine])
    one.move_to(ref(2, second, number=0), second)
    left = one.take_delta(1)
    assert left.micro_batches == 1
    rest = {name: tensor - second.tensors[name] for name, tensor in weights(one).items()}
    same(left.tensors, rest)


def disturbed(work: Callable[[CheckInterrupt], _Found]) -> _Found:
    """Ended at its first look, begun again and ended at its second, and so on until it is done."""
    for most in count():
        looks = 0

        def check(most: int = most) -> None:
            nonlocal looks
            looks += 1
            if looks > most:
                raise Interrupted

        try:
            found = work(check)
        except Interrupted:
            continue
        assert looks > 5
        return found
    raise AssertionError


@pytest.mark.parametrize("root", [0, 5])
def test_a_look_that_ends_it_leaves_all_as_it_was(root: int) -> None:
    one, undisturbed, other = member(), member(), member()
    learn(other, 7)
    theirs = other.take_delta(0)
    for found in (one, undisturbed):
        learn(found, 1)
    mine = disturbed(lambda check: one.take_delta(0, check))
    same(mine.tensors, undisturbed.take_delta(0).tensors)
    for found in (one, undisturbed):
        learn(found, 2)
        found.take_delta(1)
        learn(found, 3)
    base = merge_deltas(one.root, [mine, theirs])
    standing = ref(6, base, root=root, number=0)
    known = disturbed(lambda check: one.move_to(standing, base, check))
    assert known == undisturbed.move_to(standing, base) == (root == 0)
    same(weights(one), weights(undisturbed))
    learn(one, 4)
    learn(undisturbed, 4)
    ours, expected = disturbed(lambda check: one.take_delta(2, check)), undisturbed.take_delta(2)
    assert (ours.micro_batches, ours.known) == (expected.micro_batches, expected.known)
    same(ours.tensors, expected.tensors)


def test_a_new_root_leaves_nothing_of_what_was_given_up() -> None:
    one = member()
    learn(one, 1)
    one.take_delta(0)
    learn(one, 2)
    fresh = member()
    learn(fresh, 9)
    mark = fresh.learner.snapshot()
    used = BaseWeights(tensors=mark.tensors, updates=mark.updates, micro_batches=mark.updates)
    one.move_to(ref(5, used, root=5), used)
    same(weights(one), used.tensors)
    assert one.take_delta(1).micro_batches == 0


def test_a_mark_that_is_no_longer_known_costs_what_was_learned_since() -> None:
    one = member()
    learn(one, 1)
    first = one.take_delta(0)
    for number in range(1, 20):
        learn(one, number)
        one.take_delta(number)
    base = merge_deltas(one.root, [first])
    one.move_to(ref(1, base, number=0), base)
    same(weights(one), base.tensors)


def test_of_large_drafters_fewer_marks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.ranks.delta_tracker._SNAPSHOT_BYTES", 1)
    for handed_in, known in ((4, True), (5, False)):
        one = member()
        deltas: list[Delta] = []
        for number in range(handed_in):
            learn(one, number)
            deltas.append(one.take_delta(number))
        base = merge_deltas(one.root, deltas[:1])
        one.move_to(ref(1, base, number=0), base)
        assert one.take_delta(handed_in).micro_batches == (handed_in - 1 if known else 0)


def test_who_begins_from_a_trunk_counts_from_it() -> None:
    one, late = member(), member()
    learn(one, 1)
    base = merge_deltas(one.root, [one.take_delta(0)])
    late.move_to(ref(1, base), base)
    learn(late, 2)
    added: Delta = late.take_delta(0)
    assert (added.micro_batches, added.known) == (1, base.micro_batches)
