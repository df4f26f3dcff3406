"""The adaptive strategy policy handles its strategies and learns acceptance."""

from typing import Any

import pytest

from tlt.base.strategies import Draft, Ngram, Off, Strategy
from tlt.policies.speculation.acceptance import Acceptance, AcceptancePrior
from tlt.policies.speculation.adaptive_strategy import AdaptivePolicy
from tlt.policies.speculation.strategy_policy import StepObservation
from tlt.policies.speculation.strategy_runs import StrategyRuns


def test_chooses_the_only_strategy_on_offer() -> None:
    policy = AdaptivePolicy()
    policy.set_strategies([Off()])
    choice = policy.choose(4, 400, 0.0)
    assert (choice.strategy, choice.why) == (Off(), "only")
    with pytest.raises(ValueError, match="at least one"):
        policy.set_strategies([])


_PRIOR = AcceptancePrior(first=0.5, memory=400.0, half_life=256.0)


def test_infers_deeper_drafts_from_shallower_ones() -> None:
    acceptance = Acceptance(_PRIOR)
    acceptance.observe([1000, 800], [800, 640])
    gains = acceptance.expected_accepts(4)
    assert gains[1] == pytest.approx(0.8, abs=0.02)
    assert gains[4] == pytest.approx(0.8 + 0.8**2 + 0.8**3 + 0.8**4, abs=0.1)
    assert acceptance.uncertainty(gains, 4) > acceptance.uncertainty(gains, 2) > 0


def test_is_unsure_of_what_was_always_rejected() -> None:
    acceptance = Acceptance(_PRIOR)
    acceptance.observe([64], [0])
    before = acceptance.uncertainty(acceptance.expected_accepts(4), 4)
    acceptance.age(2000)
    assert acceptance.uncertainty(acceptance.expected_accepts(4), 4) > 5 * before > 0


def test_explores_old_estimates_again_and_corrects_them() -> None:
    acceptance = Acceptance(_PRIOR)
    acceptance.observe([1000], [100])
    gains = acceptance.expected_accepts(1)
    sure = acceptance.uncertainty(gains, 1)
    acceptance.limit_weight(4.0)
    assert acceptance.expected_accepts(1) == gains
    assert acceptance.uncertainty(gains, 1) > sure
    acceptance.observe([32], [29])
    assert acceptance.expected_accepts(1)[1] > 0.7


def _observe(policy: AdaptivePolicy, strategy: Strategy, *step: float, **counts: Any) -> None:
    runs = StrategyRuns(policy, lambda: 0.5)
    for _ in range(2):
        runs.observe(StepObservation(strategy, 8, 800, *step, **counts))
    runs.end_run()


def test_remembers_a_strategy_that_is_offered_again() -> None:
    policy = AdaptivePolicy()
    policy.set_strategies([Off(), Ngram(tokens=4)])
    for _ in range(50):
        counts = {"reached": [8, 4, 2, 1], "accepted": [4, 2, 1, 1]}
        _observe(policy, Ngram(tokens=4), 0.01, 0.001, **counts)
        _observe(policy, Off(), 0.008)
    known = policy.predict_speeds(8, 800)
    policy.set_strategies([Off(), Draft(depth=2)])
    policy.set_strategies([Off(), Ngram(tokens=4)])
    assert policy.predict_speeds(8, 800) == known
    assert known[Off()] == pytest.approx(1000, rel=0.1)
    assert known[Ngram(tokens=4)] == pytest.approx(1500, rel=0.1)


def test_a_choice_holds_longer_each_time_it_is_confirmed_and_ends_with_its_batch_size() -> None:
    policy = AdaptivePolicy()
    runs = StrategyRuns(policy, lambda: 0.5)
    runs.set_strategies([Off(), Ngram(tokens=4)])
    for _ in range(1500):
        choice = runs.choose(8, 800)
        rejected = () if choice.strategy == Off() else ([8] * 1 + [0] * 3, [0] * 4)
        seconds = 0.008 if choice.strategy == Off() else 0.02
        runs.observe(StepObservation(choice.strategy, 8, 800, seconds, 0.0, *rejected))
    assert (choice.strategy, choice.steps) == (Off(), 256)
    assert runs.choose(9, 900) is not choice


def test_decodes_plainly_while_more_was_lost_than_allowed() -> None:
    """A drafter was predicted to pay, but its proposals are rejected and cost too much."""
    policy = AdaptivePolicy()
    policy.set_strategies([Off(), Draft(depth=2)])
    lost = 0.0
    for _ in range(60):
        _observe(policy, Off(), 0.008)
    while (choice := policy.choose(8, 800, 0.5)).strategy != Off():
        for _ in range(choice.steps):
            lost += 0.04
        _observe(policy, choice.strategy, 0.048, 0.04, reached=[8, 0], accepted=[0, 0])
        assert lost < 100
    assert choice.strategy == Off()
