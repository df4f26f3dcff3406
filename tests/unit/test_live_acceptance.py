"""A drafter is compared with the one before it, under the current policy."""

import pytest

from tlt.policies.drafter.live_acceptance import (
    ChainTally,
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
