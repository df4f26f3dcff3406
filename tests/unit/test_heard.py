"""A drafter is held against the one before it, as far as that still fits the policy."""

import pytest

from tlt.policies.heard import Asked, faded, fallen

OLD = {"4 noisy": Asked(3000, 15_000), "8 plain": Asked(2500, 20_000)}


def test_what_does_much_worse_has_fallen() -> None:
    assert fallen({"4 noisy": Asked(2500, 11_000)}, OLD) is None
    assert fallen({"4 noisy": Asked(2500, 7_500)}, OLD) == pytest.approx((3.0, 5.0))
    # the same words, but another question
    assert fallen({"6 plain": Asked(2500, 2_500)}, OLD) is None


def test_it_is_not_held_against_what_an_earlier_policy_let_the_last_one_do() -> None:
    now = {"4 noisy": Asked(2500, 9_000)}
    assert fallen(now, OLD) is not None
    # the one before has come down from 5.8 to 4.2 on answers of today
    assert fallen(now, faded(OLD, measured=5.8, now=4.2)) is None
    assert faded(OLD, measured=4.0, now=4.4) == OLD
