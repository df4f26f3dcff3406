"""Policy updates wait for drafter training to stop for half a per cent of the rollouts' time."""

from random import Random
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.specs import small_spec
from tests.simulation.started_run import started_run
from tests.simulation.training_world import WHOLE_STEP, TrainingWorld, training_stopped
from tlt.policies.drafter.stopping_costs import StoppingCosts
from tlt.policies.drafter.training_evidence import EvaluatedVersion, TrainingEvidence
from tlt.policies.run import drafter_training_scheduler
from tlt.policies.run.run_state import Phase, RunState, Turn
from tlt.policies.speculation import savings_estimate
from tlt.policies.speculation.plain_step_costs import SavingsInterval

_TOO_HIGH = StoppingCosts(wait_seconds=1.0, rollout_seconds=10.0)


def _train(rollouts: list[float], waits: list[float]) -> list[bool]:
    """Return in which steps the workers train."""
    costs, trained = StoppingCosts(), list[bool]()
    for rollout, wait in zip(rollouts, waits, strict=True):
        trained.append(not costs.too_high)
        costs = costs.add_rollout(rollout)
        if trained[-1]:
            costs = costs.add_wait(wait)
    return trained


def test_short_steps_train_once_in_a_while_and_long_ones_always() -> None:
    short = _train([0.25] * 400, [0.006] * 400)
    assert sum(short) / len(short) == pytest.approx(0.21, abs=0.02)
    assert all(_train([3.0] * 400, [0.006] * 400))


@given(st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_waits_take_no_more_than_the_limit_in_the_long_run(scale: int, seed: int) -> None:
    chooser, steps = Random(seed), 2000
    rollouts = [chooser.uniform(0.5, 1.5) for _ in range(steps)]
    waits = [chooser.expovariate(1000.0 / scale) for _ in range(steps)]
    trained = _train(rollouts, waits)
    waited = sum(wait for wait, trains in zip(waits, trained, strict=True) if trains)
    assert waited <= 0.006 * sum(rollouts) + max(waits)


def test_a_single_long_wait_is_forgotten() -> None:
    trained = _train([20.0] * 300, [30.0, *[0.01] * 299])
    assert trained[1:100] == [False] * 99
    assert all(trained[200:])


def test_a_clock_that_goes_back_does_not_stop_training() -> None:
    assert not StoppingCosts().add_rollout(-3600.0).too_high


def _with(state: RunState, **drafter: Any) -> RunState:
    return msgspec.structs.replace(state, drafter=msgspec.structs.replace(state.drafter, **drafter))


@pytest.mark.parametrize(("train", "may"), [("auto", False), ("always", True)])
def test_idle_workers_do_not_train_beyond_it(train: Literal["auto", "always"], may: bool) -> None:
    state = started_run(small_spec(steps=9, train=train))[0]
    assert drafter_training_scheduler.may_train(Turn(state, 0.0))
    limited = _with(state, stopping=_TOO_HIGH)
    assert drafter_training_scheduler.may_train(Turn(limited, 0.0)) is may


@pytest.mark.parametrize(
    ("failures", "low", "may"), [(0, 1.0, True), (2, 1.0, True), (3, 1.0, False), (0, -1.0, False)]
)
def test_it_does_not_hold_while_the_drafter_improves_and_time_is_saved(
    monkeypatch: pytest.MonkeyPatch, failures: int, low: float, may: bool
) -> None:
    version = EvaluatedVersion(
        version=1,  # pyright: ignore[reportArgumentType]
        micro_batches=1,
        accept_length_before=1.0,
        accept_length=2.0,
    )
    evidence = TrainingEvidence(evaluations=(version,), failures=failures)
    saved = savings_estimate.Savings(
        total=SavingsInterval(seconds=2.0, low=low, high=3.0),
        **dict.fromkeys(("plain_seconds", "control_seconds", "control_cost", "overhead"), 1.0),
        buckets=(),
        runs=9,
    )
    monkeypatch.setattr(savings_estimate, "estimate_savings", lambda *_, **__: saved)
    state = _with(started_run(small_spec(steps=9, train="auto"))[0], evidence=evidence)
    turn = Turn(_with(state, stopping=_TOO_HIGH), 0.0)
    assert drafter_training_scheduler.may_train(turn) is may
    # nor is it reached by waits that pay
    turn.enter(Phase.POLICY_UPDATE)
    drafter_training_scheduler.record_stop(turn, 1.0)
    assert (turn.state.drafter.stopping == _TOO_HIGH) is may


def test_counts_how_long_the_slowest_worker_takes_to_stop_for_an_update() -> None:
    world = TrainingWorld(train="auto").start_training()
    world.run_until(lambda: world.state.phase is Phase.POLICY_UPDATE, *WHOLE_STEP)
    assert world.state.drafter.stopping.wait_seconds == 0.0
    late = msgspec.structs.replace(training_stopped(world), seconds=0.25)
    world.post("w0", late)
    world.deliver(len(world.log) - 1)
    assert world.state.drafter.stopping.wait_seconds == 0.25
    assert world.state.drafter.stopping.add_wait(0.4).wait_seconds == pytest.approx(0.4)


def test_does_not_count_sessions_that_end_in_a_rollout() -> None:
    world = TrainingWorld(train="auto").start_training()
    world.post("w0", msgspec.structs.replace(training_stopped(world), seconds=100.0))
    world.deliver(len(world.log) - 1)
    assert world.state.phase is Phase.ROLLOUT
    assert world.state.drafter.stopping.wait_seconds == 0.0


def test_a_rollout_that_was_paused_allows_few_more_waits() -> None:
    hours = 8 * 3600.0
    steps = [*[0.25] * 100, hours, *[0.25] * 400]
    trained = _train(steps, [0.006] * len(steps))
    assert sum(trained[101:]) < 1.5 * 0.21 * 400


def test_a_worker_that_never_stops_counts_with_all_that_it_may_take() -> None:
    world = TrainingWorld(train="auto").start_training()
    world.run_until(lambda: world.state.phase is Phase.POLICY_UPDATE, *WHOLE_STEP)
    world.workers.crash(world.trainee)
    world.settle()
    stop_seconds = world.state.spec.drafter.stop_seconds
    assert world.state.drafter.stopping.wait_seconds == stop_seconds


def test_explains_it_once() -> None:
    world = TrainingWorld(train="auto", steps=6)
    world.state = _with(world.state, stopping=StoppingCosts(wait_seconds=1e9))
    world.run_until(lambda: world.state.step == 4, *WHOLE_STEP)
    told = [str(each) for each in world.commands if "for drafter training to stop" in str(each)]
    assert len(told) == 1
