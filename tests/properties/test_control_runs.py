"""Control runs take their share of the time, cover all buckets and stay unbiased."""

from collections import Counter, defaultdict
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.policies.speculation.control_runs import RUN_STEPS, ControlRunPolicy
from tlt.policies.speculation.strategy_policy import Choice, StepObservation, bucket_of
from tlt.strategies import Draft, Off, Strategy

ARM = Draft(depth=4)


class RecordingPolicy:
    """Record the calls that the policy under control receives."""

    def __init__(self) -> None:
        self.numbers: list[float] = []
        self.seen: list[Strategy] = []

    def set_strategies(self, strategies: Any) -> None: ...

    def choose(self, batch: int, context: int, random: float) -> Choice:
        self.numbers.append(random)
        return Choice(ARM, 1.0, "best")

    def observe(self, step: StepObservation) -> None:
        self.seen.append(step.strategy)

    def observe_probe(self, *_: Any) -> None: ...

    def handle_drafter_swap(self) -> None: ...

    def handle_weight_swap(self) -> None: ...


def decode(
    control: ControlRunPolicy, batches: list[int], seconds: dict[int, float], seed: int
) -> list[bool]:
    """Return True for each decode step that was plain."""
    dice, plain = Random(seed), list[bool]()
    for batch in batches:
        choice = control.choose(batch, 100 * batch, dice.random())
        plain.append(choice.why == "control")
        assert choice.strategy == (Off() if plain[-1] else ARM)
        control.observe(
            StepObservation(choice.strategy, batch, 100 * batch, seconds[batch], 0.0, [], [])
        )
    return plain


def runs(plain: list[bool]) -> list[tuple[int, int]]:
    """Return the first step and the number of steps of each control run."""
    found: list[tuple[int, int]] = []
    for at, is_plain in enumerate(plain):
        if is_plain and at and plain[at - 1]:
            found[-1] = found[-1][0], found[-1][1] + 1
        elif is_plain:
            found.append((at, 1))
    return found


@given(
    share=st.floats(0.005, 0.49),
    stays=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 900)), min_size=1, max_size=30),
    data=st.data(),
    seed=st.integers(0, 2**32),
)
def test_control_runs_take_their_share_and_reach_each_bucket(
    share: float, stays: list[tuple[int, int]], data: st.DataObject, seed: int
) -> None:
    batches = [batch for batch, steps in stays for _ in range(steps)]
    some = st.one_of(st.floats(1e-4, 1.0), st.sampled_from([0.0, 1e9]))
    seconds = {batch: data.draw(some) for batch in sorted(set(batches))}
    policy = RecordingPolicy()
    plain = decode(ControlRunPolicy(policy, share), batches, seconds, seed)
    buckets = len({bucket_of(batch) for batch in batches})
    assert sum(plain) <= share * len(plain) + RUN_STEPS * buckets
    *whole, _ = [*runs(plain), (0, 0)]
    ended = [(at, steps) for at, steps in whole if at + steps < len(plain)]
    assert all(steps % RUN_STEPS == 0 for _, steps in ended)
    assert all(0.0 <= number < 1.0 for number in policy.numbers)
    assert [strategy == Off() for strategy in policy.seen] == plain


@pytest.mark.parametrize("seed", range(3))
def test_buckets_get_control_runs_in_proportion_to_their_time(seed: int) -> None:
    """Repeated draining has few long decode steps and many short ones."""
    stays = {64: 40, 32: 60, 12: 100, 6: 200, 3: 400, 1: 800}
    seconds = {batch: 0.001 * (2 + batch) for batch in stays}
    rollout = [batch for batch, steps in stays.items() for _ in range(steps)]
    plain = decode(ControlRunPolicy(RecordingPolicy(), 0.04), rollout * 60, seconds, seed)
    assert sum(plain) / len(plain) == pytest.approx(0.04, rel=0.15)
    begun = Counter((rollout * 60)[at] for at, _ in runs(plain))
    total = sum(stays[batch] * seconds[batch] for batch in stays)
    for batch, steps in stays.items():
        expected = sum(begun.values()) * steps * seconds[batch] / total
        assert begun[batch] == pytest.approx(expected, abs=2 + 0.12 * expected), batch


def test_every_step_of_a_bucket_is_equally_likely_to_be_a_control_step() -> None:
    """The duration of the decode steps doesn't matter."""
    rollout = [batch for batch in range(16, 8, -1) for _ in range(50)]
    seconds = {batch: 0.01 if batch % 2 else 0.1 for batch in rollout}
    met: defaultdict[int, int] = defaultdict(int)
    for seed in range(40):
        plain = decode(ControlRunPolicy(RecordingPolicy(), 0.1), rollout * 20, seconds, seed)
        for batch, is_plain in zip(rollout * 20, plain, strict=True):
            met[batch] += is_plain
    mean = sum(met.values()) / len(met)
    assert all(count == pytest.approx(mean, rel=0.2) for count in met.values()), met


def test_random_numbers_passed_to_the_policy_stay_uniform() -> None:
    policy = RecordingPolicy()
    decode(ControlRunPolicy(policy, 0.3), [4] * 20_000, {4: 0.01}, 0)
    tenths = Counter(int(10 * number) for number in policy.numbers)
    assert all(
        tenths[tenth] == pytest.approx(len(policy.numbers) / 10, rel=0.1) for tenth in range(10)
    )


def test_control_run_ends_with_its_rollout() -> None:
    control = ControlRunPolicy(RecordingPolicy(), 0.4)
    while control.choose(2, 100, 0.0).why != "control":
        pass
    control.handle_weight_swap()
    assert control.choose(2, 100, 1.0 - 1e-9).why == "best"


@pytest.mark.parametrize("share", [0.0, 0.5, -0.1])
def test_refuses_shares_that_leave_nothing_to_compare(share: float) -> None:
    with pytest.raises(ValueError, match="below a half"):
        ControlRunPolicy(RecordingPolicy(), share)
