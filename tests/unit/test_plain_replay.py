"""A replay has the batch sizes of plain decoding, whatever could be guessed."""

from hypothesis import given
from hypothesis import strategies as st

from tlt.policies.speculation.plain_replay import ExtraGroups, replay
from tlt.policies.speculation.plain_step_costs import knots_of


def _one(rows: float) -> float:
    return 1.0


def test_fills_a_free_slot_from_the_queue() -> None:
    """Two answers decode for four steps: 4 and 2, which 3 follows; 3 needs one more alone."""
    replayed = replay([4, 2, 3], ranks=1, slots=2, seconds_of=_one)
    assert replayed.steps == replayed.last == {2: 4.0, 1: 1.0}


def test_ranks_share_the_queue_and_the_last_one_makes_the_wait() -> None:
    replayed = replay([5, 1, 2, 1], ranks=2, slots=1, seconds_of=_one)
    assert replayed.steps == {1: 9.0}
    assert replayed.last == {1: 5.0}


def test_a_rank_begins_with_no_more_than_its_share() -> None:
    replayed = replay([3, 3, 3, 3], ranks=2, slots=16, seconds_of=_one)
    assert replayed.steps == {2: 6.0}
    assert replayed.last == {2: 3.0}


def test_a_slow_rank_takes_fewer_answers() -> None:
    """Three rows cost ten seconds a step and two cost two: the pair is free again sooner."""
    costs = {1: 1.0, 2: 2.0, 3: 10.0}
    lengths = [8, 8, 8, 2, 2, 2]
    replayed = replay(lengths, ranks=2, slots=3, seconds_of=lambda rows: costs[int(rows)])
    assert replayed.last == knots_times(3, 8.0)


def test_an_extra_group_waits_for_the_group_that_it_replaces() -> None:
    """The first pair decodes two steps, then the extra pair one, and the second pair two more."""
    extra = ExtraGroups(size=2, count=1, replaceable=frozenset({0}))
    replayed = replay([2, 2, 5, 5, 1, 1], ranks=1, slots=6, seconds_of=_one, extra=extra)
    assert replayed.steps == {4: 3.0, 2: 2.0}


def test_an_idle_rank_decodes_an_extra_group() -> None:
    extra = ExtraGroups(size=2, count=1, replaceable=frozenset({1}))
    replayed = replay([1, 1, 3, 3, 2, 1], ranks=4, slots=1, seconds_of=_one, extra=extra)
    assert replayed.steps == {1: 11.0}
    assert replayed.last == {1: 5.0}


def knots_times(rows: int, steps: float) -> dict[int, float]:
    return {knot: share * steps for knot, share in knots_of(rows).items()}


@given(
    lengths=st.lists(st.integers(0, 60), max_size=40),
    ranks=st.integers(1, 4),
    slots=st.integers(1, 12),
)
def test_decodes_every_token_once(lengths: list[int], ranks: int, slots: int) -> None:
    replayed = replay(lengths, ranks, slots, _one)
    rows = sum(knot * steps for knot, steps in replayed.steps.items())
    assert abs(rows - sum(lengths)) < 1e-6
    last = sum(replayed.last.values())
    assert last >= max(lengths, default=0) - 1e-6
    assert last <= sum(replayed.steps.values()) + 1e-6


@given(
    lengths=st.lists(st.integers(1, 60), min_size=6, max_size=6),
    ranks=st.integers(1, 4),
    slots=st.integers(1, 12),
)
def test_decodes_extra_groups_once(lengths: list[int], ranks: int, slots: int) -> None:
    """The first extra group agrees, too, and is replaced by the second."""
    extra = ExtraGroups(size=2, count=2, replaceable=frozenset({0, 1}))
    replayed = replay(lengths, ranks, slots, _one, extra)
    rows = sum(knot * steps for knot, steps in replayed.steps.items())
    assert abs(rows - sum(lengths)) < 1e-6
    pairs = [max(lengths[i : i + 2]) for i in range(0, 6, 2)]
    chained = sum(pairs) <= sum(replayed.steps.values()) + 1e-6
    assert chained or ranks > 1


@given(st.floats(1.0, 300.0))
def test_knots_lie_around_the_rows(rows: float) -> None:
    shares = knots_of(rows)
    assert abs(sum(shares.values()) - 1.0) < 1e-9
    assert abs(sum(knot * share for knot, share in shares.items()) - rows) < 1e-6
    assert all(share >= 0.0 for share in shares.values())
