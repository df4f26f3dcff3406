"""A drafter is compared with the one before it, under the current policy."""

import pytest

from tests.samples import tally
from tlt.base.id_types import DrafterVersion
from tlt.base.strategies import Draft
from tlt.policies.drafter.live_acceptance import (
    ChainTally,
    add_recent_tallies,
    estimate_accept_length,
    find_regression,
    scale_to_current_policy,
)

OLD = {"4 noisy": ChainTally(3000, 15_000), "8 plain": ChainTally(2500, 20_000)}


def test_finds_a_drafter_that_does_much_worse() -> None:
    assert find_regression({"4 noisy": ChainTally(2500, 11_000)}, OLD) is None
    assert find_regression({"4 noisy": ChainTally(2500, 7_500)}, OLD) == pytest.approx((3.0, 5.0))
    # other chains don't count
    assert find_regression({"6 plain": ChainTally(2500, 2_500)}, OLD) is None


def test_scales_the_fallback_to_the_current_policy() -> None:
    now = {"4 noisy": ChainTally(2500, 9_000)}
    assert find_regression(now, OLD) is not None
    # under the current policy the previous drafter fell from 5.8 to 4.2
    assert find_regression(now, scale_to_current_policy(OLD, measured=5.8, now=4.2)) is None
    assert scale_to_current_policy(OLD, measured=4.0, now=4.4) == OLD


@pytest.mark.parametrize("likely", [0.0, 0.3, 0.9, 1.0])
def test_estimates_accept_length_from_chains_of_any_length(likely: float) -> None:
    def chains(depth: int, rows: int = 10_000) -> ChainTally:
        return ChainTally(rows, round(rows * sum(likely**guess for guess in range(depth + 1))))

    expected = sum(likely**guess for guess in range(7))
    for depth in (1, 4, 8):
        length = estimate_accept_length({f"{depth} plain": chains(depth)}, 6)
        assert length == pytest.approx(expected, abs=0.01)
    both = {"2 noisy": chains(2), "8 plain": chains(8)}
    assert estimate_accept_length(both, 6) == pytest.approx(expected, abs=0.01)
    assert estimate_accept_length({"4 plain": chains(4, rows=1999)}, 6) is None


def test_forgets_old_tallies() -> None:
    drafter = DrafterVersion(0)
    then, now = (tally(rows * 3000, 1.0, rows=3000) for rows in (3, 1))
    tallies = add_recent_tallies({}, [then] * 6, drafter)
    assert tallies == {"2 noisy": ChainTally(18_000, 54_000)}
    for _ in range(80):
        tallies = add_recent_tallies(tallies, [now], drafter)
    assert 20_000 <= tallies["2 noisy"].rows < 40_000
    assert tallies["2 noisy"].tokens == pytest.approx(tallies["2 noisy"].rows, rel=0.01)
    assert add_recent_tallies(tallies, [now], DrafterVersion(7)) == tallies


def test_chains_that_are_no_longer_used_keep_their_estimate() -> None:
    drafter, tallies = DrafterVersion(0), dict[str, ChainTally]()
    for depth in (8, 4):
        length = sum(0.75**guess for guess in range(depth + 1))
        some = tally(round(40 * length), 1.0, strategy=Draft(depth=depth), rows=40)
        for _ in range(2000):
            tallies = add_recent_tallies(tallies, [some], drafter)
    assert estimate_accept_length(tallies, 6) == pytest.approx(3.47, abs=0.05)
