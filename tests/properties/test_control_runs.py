"""Control runs take their share of the steps, wherever they are, and stay unbiased."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.base.strategies import Draft, Off, Strategy
from tlt.policies.speculation.control_runs import RUN_STEPS, ControlRunPolicy
from tlt.policies.speculation.strategy_policy import Choice, RunObservation, StepObservation
from tlt.policies.speculation.strategy_runs import StrategyRuns

ARM = Draft(depth=4)


class RecordingPolicy:
    """Record the calls that the policy under control receives."""

    def __init__(self, steps: int = 8) -> None:
        self.numbers: list[float] = []
        self.seen: list[tuple[Strategy, int]] = []
        self._steps = steps

    def set_strategies(self, strategies: Any) -> None: ...

    def choose(self, batch: int, context: int, random: float) -> Choice:
        self.numbers.append(random)
        return Choice(ARM, 1.0, "best", self._steps)

    def observe(self, run: RunObservation) -> None:
        self.seen.append((run.strategy, run.steps))

    def handle_drafter_swap(self) -> None: ...

    def handle_weight_swap(self) -> None: ...


def decode(control: ControlRunPolicy, batches: Sequence[int], seed: int) -> list[bool]:
    """Return True for each decode step that was plain."""
    runs, plain = StrategyRuns(control, Random(seed).random), list[bool]()
    for batch in batches:
        choice = runs.choose(batch, 100 * batch)
        plain.append(choice.why == "control")
        assert choice.strategy == (Off() if plain[-1] else ARM)
        runs.observe(StepObservation(choice.strategy, batch, 100 * batch, 0.01))
    runs.end_run()
    return plain


def lengths(plain: Sequence[bool]) -> list[int]:
    """Return the number of steps of each control run."""
    found: list[int] = []
    for at, is_plain in enumerate(plain):
        if is_plain and at and plain[at - 1]:
            found[-1] += 1
        elif is_plain:
            found.append(1)
    return found


@given(
    share=st.floats(0.005, 0.45),
    stays=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 900)), min_size=1, max_size=30),
    seed=st.integers(0, 2**32),
)
def test_control_runs_last_a_fixed_number_of_steps_at_any_batch_size(
    share: float, stays: list[tuple[int, int]], seed: int
) -> None:
    batches = [batch for batch, steps in stays for _ in range(steps)]
    policy = RecordingPolicy()
    plain = decode(ControlRunPolicy(policy, share), batches, seed)
    whole = lengths(plain)[: -1 if plain[-1] else None]
    assert all(steps % RUN_STEPS == 0 for steps in whole)
    assert all(0.0 <= number < 1.0 for number in policy.numbers)
    assert sum(steps for _, steps in policy.seen) == len(plain)
    assert sum(steps for arm, steps in policy.seen if arm == Off()) == sum(plain)


@pytest.mark.parametrize("share", [0.02, 0.15])
@pytest.mark.parametrize("steps", [1, 8, 64])
def test_control_runs_take_their_share(share: float, steps: int) -> None:
    # some 500 control runs
    steps_decoded = round(500 * RUN_STEPS / share)
    plain = decode(ControlRunPolicy(RecordingPolicy(steps), share), [4] * steps_decoded, 1)
    assert sum(plain) / len(plain) == pytest.approx(share, rel=0.1)


def test_every_step_is_equally_likely_to_be_a_control_step() -> None:
    """A drain visits large batches for few steps and small ones for many."""
    stays = {64: 40, 32: 60, 12: 100, 6: 200, 3: 400, 1: 800}
    rollout = [batch for batch, steps in stays.items() for _ in range(steps)]
    met: defaultdict[int, int] = defaultdict(int)
    for seed in range(10):
        plain = decode(ControlRunPolicy(RecordingPolicy(), 0.1), rollout * 20, seed)
        for batch, is_plain in zip(rollout * 20, plain, strict=True):
            met[batch] += is_plain
    for batch, steps in stays.items():
        assert met[batch] / (200 * steps) == pytest.approx(0.1, rel=0.25), batch


def test_random_numbers_passed_to_the_policy_stay_uniform() -> None:
    policy = RecordingPolicy(1)
    decode(ControlRunPolicy(policy, 0.3), [4] * 20_000, 0)
    tenths = Counter(int(10 * number) for number in policy.numbers)
    assert all(
        tenths[tenth] == pytest.approx(len(policy.numbers) / 10, rel=0.1) for tenth in range(10)
    )


def test_control_run_ends_with_its_rollout() -> None:
    runs = StrategyRuns(ControlRunPolicy(RecordingPolicy(), 0.4), Random(0).random)
    while runs.choose(2, 100).why != "control":
        runs.observe(StepObservation(ARM, 2, 100, 0.01))
    runs.handle_weight_swap()
    assert runs.choose(2, 100).why == "best"


@pytest.mark.parametrize("share", [0.0, 0.5, -0.1])
def test_refuses_shares_that_leave_nothing_to_compare(share: float) -> None:
    with pytest.raises(ValueError, match="below a half"):
        ControlRunPolicy(RecordingPolicy(), share)
