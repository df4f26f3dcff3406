"""A pause cuts the answers of a step, and leaves those of an evaluation to start over."""

from random import Random

import pytest

from tests.simulation.specs import small_spec
from tests.simulation.walk import step
from tests.simulation.worker_events import JOB
from tests.simulation.world import World
from tlt.policies.run.coordinator import decide
from tlt.policies.run.run_state import Phase
from tlt.protocol.commands import CutAnswers, PauseJob


def _walk_to(world: World, phase: Phase) -> None:
    chooser = Random(1)
    while world.state.phase is not phase or not any(
        incarnation.held for incarnation in world.incarnations.values()
    ):
        step(world, chooser, faults=0.0, overtaking=0.0)


@pytest.mark.parametrize(
    ("phase", "defer_long", "cuts"),
    [(Phase.ROLLOUT, 0.0, True), (Phase.ROLLOUT, 0.5, False), (Phase.EVALUATING, 0.0, False)],
)
def test_cuts_answers_that_can_go_on(phase: Phase, defer_long: float, cuts: bool) -> None:
    world = World(small_spec(steps=3, eval_every=1, defer_long=defer_long), [1])
    _walk_to(world, phase)
    _, commands = decide(world.state, PauseJob(job=JOB), 0.0)
    assert any(isinstance(command, CutAnswers) for command in commands) is cuts
