"""The tail of a step that ends early says with how many groups, and how many wait."""

from random import Random

import pytest

from tests.simulation.specs import small_spec
from tests.simulation.walk import finish, step
from tests.simulation.world import World
from tlt.dashboard.rollout_tail import RolloutTail, RunningAnswers
from tlt.policies.run.run_state import Phase
from tlt.spec.config import JobSpec


@pytest.mark.parametrize(
    ("spec", "waiting"),
    [
        (small_spec(steps=4, prompts=2, defer_long=0.5), 1),
        (small_spec(steps=4, prompts=2, partial=0.5), 0),
    ],
)
def test_names_the_groups_that_end_a_step_and_those_that_wait(spec: JobSpec, waiting: int) -> None:
    """Groups that are cut go on in the next step, so only those that are put off wait."""
    world, chooser = World(spec, [1]), Random(1)

    def walk_to(number: int) -> None:
        while world.state.step < number or world.state.phase is not Phase.ROLLOUT:
            step(world, chooser, faults=0.0, overtaking=0.0)

    walk_to(1)
    view = RolloutTail().view(world.state, now=0.0, known=RunningAnswers())

    assert view.early_end is not None
    assert view.early_end.wanted == 2
    assert view.early_end.issued == 3
    assert view.waiting_groups == waiting
    assert view.forecast is None
    finish(world)


def test_a_step_that_waits_for_all_has_no_early_end() -> None:
    world, chooser = World(small_spec(prompts=2), [1]), Random(1)
    while world.state.phase is not Phase.ROLLOUT:
        step(world, chooser, faults=0.0, overtaking=0.0)

    view = RolloutTail().view(world.state, now=0.0, known=RunningAnswers())

    assert view.early_end is None
    assert view.waiting_groups == 0
    finish(world)
