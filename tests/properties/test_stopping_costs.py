"""Waiting for drafter training to stop takes one per cent of the rollouts, unless it has paid."""

from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.specs import small_spec
from tests.simulation.started_run import started_run
from tests.simulation.training_world import WHOLE_STEP, TrainingWorld
from tests.simulation.world import SECONDS_AN_EVENT
from tlt.policies.drafter.stopping_costs import StoppingCosts
from tlt.policies.run import drafter_training_scheduler
from tlt.policies.run.run_state import Turn

_SECONDS = st.floats(0.01, 100.0)


@given(steps=st.lists(st.tuples(_SECONDS, _SECONDS), max_size=200), saved=st.floats(0.0, 10.0))
def test_waits_exceed_the_limit_by_one_step_at_most(
    steps: list[tuple[float, float]], saved: float
) -> None:
    costs, longest = StoppingCosts(), 0.0
    for rollout, wait in steps:
        trains = not costs.too_high
        costs = costs.add_rollout(rollout, saved)
        if trains:
            costs = costs.begin(0.0).end(wait)
            longest = max(longest, wait)
    assert costs.waited <= 0.01 * costs.rolled + saved + longest


def test_short_steps_train_once_in_a_while_and_long_ones_always() -> None:
    assert _share_of_training(rollout=0.3, wait=0.012) == pytest.approx(0.25, abs=0.01)
    assert _share_of_training(rollout=3.0, wait=0.012) == 1.0


def _share_of_training(rollout: float, wait: float) -> float:
    costs, trained, steps = StoppingCosts(), 0, 400
    for _ in range(steps):
        trains = not costs.too_high
        costs = costs.add_rollout(rollout, saved=0.0)
        if trains:
            trained += 1
            costs = costs.begin(5.0).end(5.0 + wait)
    return trained / steps


@pytest.mark.parametrize(("train", "may"), [("auto", False), ("always", True)])
def test_idle_workers_do_not_train_beyond_it(train: Literal["auto", "always"], may: bool) -> None:
    state = started_run(small_spec(steps=9, train=train))[0]
    assert drafter_training_scheduler.may_train(Turn(state, 0.0))
    stopping = StoppingCosts(waited=0.2, rolled=10.0)
    drafter = msgspec.structs.replace(state.drafter, stopping=stopping)
    state = msgspec.structs.replace(state, drafter=drafter)
    assert drafter_training_scheduler.may_train(Turn(state, 0.0)) is may


def test_counts_the_seconds_from_the_last_score_until_training_has_stopped() -> None:
    world = TrainingWorld(train="auto").start_training()
    world.run_until(lambda: world.emitted["StopDrafterTraining"] > 0, *WHOLE_STEP)
    assert world.state.drafter.stopping.waited == 0.0
    asked = len(world.journal)
    assert world.state.drafter.stopping.rolled > 0.0
    world.run_until(lambda: world.emitted["UpdatePolicy"] > 0, *WHOLE_STEP)
    waited = world.state.drafter.stopping.waited
    assert waited == pytest.approx(SECONDS_AN_EVENT * (len(world.journal) - asked))
    assert waited > 0.0


def test_explains_it_once() -> None:
    world = TrainingWorld(train="auto", steps=6)
    stopping = StoppingCosts(waited=1e9)
    drafter = msgspec.structs.replace(world.state.drafter, stopping=stopping)
    world.state = msgspec.structs.replace(world.state, drafter=drafter)
    world.run_until(lambda: world.state.step == 4, *WHOLE_STEP)
    told = [str(command) for command in world.commands if "1 % of the rollouts" in str(command)]
    assert len(told) == 1
