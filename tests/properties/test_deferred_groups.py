"""Groups that are put off come back in a later step, whatever is lost, late or repeated.

`tests.simulation.sampling_checks` holds the invariants; random walks meet these steps, too.
"""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.specs import small_spec
from tests.simulation.walk import finish, step
from tests.simulation.world import TRAIN_PROMPTS, World

seeds = st.integers(0, 2**32 - 1)


def issued_by(world: World, seed: int) -> list[int]:
    """Return how many groups each step issued, once the job is done."""
    chooser = Random(seed)
    while not world.ended:
        step(world, chooser, faults=0.0, overtaking=0.2)
    finish(world)
    return list(world.checks.sampling.issued.values())


@given(seeds)
def test_steps_that_end_early_are_followed_by_one_of_what_they_put_off(seed: int) -> None:
    spec = small_spec(steps=6, prompts=2, defer_long=0.5)
    assert issued_by(World(spec, [1, 2]), seed) == [3, 3, 2, 3, 3, 2]


@given(seeds)
def test_the_last_steps_leave_nothing_behind(seed: int) -> None:
    spec = small_spec(steps=3, prompts=2, defer_long=0.5)
    # a second surplus would have no step left
    assert issued_by(World(spec, [1, 2]), seed) == [3, 3, 2]
    spec = small_spec(steps=2, prompts=2, defer_long=0.5)
    # one new prompt with the one that was put off
    assert issued_by(World(spec, [1, 2]), seed) == [3, 2]


def test_refuses_fewer_prompts_than_two_steps_may_hold() -> None:
    world = World(small_spec(prompts=3, defer_long=0.5), [1])
    world.run_out(100)
    assert world.status == "failed"
    assert f"needs 7 rows, and data.train has {TRAIN_PROMPTS}" in str(world.error)
