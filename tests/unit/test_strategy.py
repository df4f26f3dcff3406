"""Both strategy policies handle their strategies, and the adaptive one learns acceptance."""

import pytest

from benchmarks.bandit import BucketBandit
from tlt.policies.speculation.acceptance_by_batch_size import AcceptanceByBatchSize
from tlt.policies.speculation.acceptance_model import AcceptanceModel
from tlt.policies.speculation.adaptive_strategy import AdaptivePolicy
from tlt.policies.speculation.strategy_policy import StepObservation
from tlt.strategies import Draft, Ngram, Off


@pytest.mark.parametrize("policy", [AdaptivePolicy(), BucketBandit()], ids=["adaptive", "bandit"])
def test_chooses_the_only_strategy_on_offer(policy: AdaptivePolicy | BucketBandit) -> None:
    policy.set_strategies([Off()])
    choice = policy.choose(4, 400, 0.0)
    assert (choice.strategy, choice.why) == (Off(), "only")
    with pytest.raises(ValueError, match="at least one"):
        policy.set_strategies([])


def test_infers_deeper_drafts_from_shallower_ones() -> None:
    acceptance = AcceptanceModel(0.5)
    acceptance.observe([1000, 800], [800, 640])
    gains = acceptance.expected_accepts(4)
    assert gains[1] == pytest.approx(0.8, abs=0.02)
    assert gains[4] == pytest.approx(0.8 + 0.8**2 + 0.8**3 + 0.8**4, abs=0.1)
    assert acceptance.uncertainty(4) > acceptance.uncertainty(2) > 0


def test_explores_old_estimates_again_and_corrects_them() -> None:
    acceptance = AcceptanceModel(0.5)
    acceptance.observe([1000], [100])
    before, sure = acceptance.expected_accepts(1)[1], acceptance.uncertainty(1)
    acceptance.discount(1.0, most=4.0)
    assert acceptance.expected_accepts(1)[1] == pytest.approx(before, abs=0.3)
    assert acceptance.uncertainty(1) > sure
    acceptance.observe([32], [29])
    assert acceptance.expected_accepts(1)[1] > 0.7


def test_remembers_a_strategy_that_is_offered_again() -> None:
    policy = AdaptivePolicy()
    policy.set_strategies([Off(), Ngram(tokens=4)])
    for _ in range(50):
        counts = [8, 4, 2, 1], [4, 2, 1, 1]
        policy.observe(StepObservation(Ngram(tokens=4), 8, 800, 0.01, 0.001, *counts))
        policy.observe(StepObservation(Off(), 8, 800, 0.008, 0.0, [], []))
    known = policy.predict_speeds(8, 800)
    policy.set_strategies([Off(), Draft(depth=2)])
    policy.set_strategies([Off(), Ngram(tokens=4)])
    assert policy.predict_speeds(8, 800) == known
    assert known[Off()] == pytest.approx(1000, rel=0.1)
    assert known[Ngram(tokens=4)] == pytest.approx(1600, rel=0.1)


def test_infers_unseen_strategies_from_seen_ones() -> None:
    one, other = AcceptanceModel(0.6), AcceptanceModel(0.6)
    one.link(other)
    before = other.expected_accepts(2)[2]
    one.observe([1000, 900], [900, 810])
    assert other.expected_accepts(2)[2] == pytest.approx(0.9 + 0.81, abs=0.02)
    assert other.expected_accepts(2)[2] > before
    assert other.uncertainty(2) > 2 * one.uncertainty(2)
    other.observe([1000, 300], [300, 90])
    assert other.expected_accepts(2)[2] == pytest.approx(0.3 + 0.09, abs=0.02)
    assert one.expected_accepts(2)[2] == pytest.approx(0.9 + 0.81, abs=0.02)


def test_infers_unseen_batch_sizes_from_the_next_larger_seen() -> None:
    acceptances = AcceptanceByBatchSize(0.6, memory=100.0)

    def first(batch: int) -> float:
        return acceptances.expected_accepts(batch, 1)[1]

    assert first(4) == 0.6
    acceptances.observe(60, [1000], [100])
    assert first(64) == first(5) == first(300) == pytest.approx(0.1, abs=0.01)
    acceptances.observe(2, [8], [8])
    assert first(2) > 0.5
    assert first(1) == first(2)
    assert first(3) == first(64)
    assert acceptances.uncertainty(2, 1) > acceptances.uncertainty(64, 1)
    assert acceptances.uncertainty(3, 1) > acceptances.uncertainty(64, 1)
    before = [acceptances.uncertainty(batch, 1) for batch in (2, 64)]
    acceptances.discount(1.0, most=4.0)
    faded = [acceptances.uncertainty(batch, 1) for batch in (2, 64)]
    assert all(now > then for now, then in zip(faded, before, strict=True))
