"""Groups that are put off come back in a later step, whatever is lost, late or repeated.

`tests.simulation.sampling_checks` holds the invariants; random walks meet these steps, too.
"""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.incarnation import blob
from tests.simulation.specs import small_spec
from tests.simulation.walk import finish, step
from tests.simulation.world import TRAIN_PROMPTS, World
from tlt.base.id_types import JobId, PolicyVersion, PromptIndex
from tlt.policies.algorithm import prompt_order
from tlt.policies.run.deferred_groups import take_over
from tlt.protocol.refs import Checkpoint, PromptCursor, StartingCheckpoint

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


@given(seeds)
def test_takes_over_what_another_job_has_put_off(seed: int) -> None:
    """Indices that this job's data don't have are left out, and so is what it has no room for."""
    spec = small_spec(steps=4, prompts=2, defer_long=0.5)
    used, cursor = prompt_order.take(spec, PromptCursor(), TRAIN_PROMPTS, 3)
    deferred = (PromptIndex(TRAIN_PROMPTS), *used)
    cursor = PromptCursor(position=cursor.position, deferred=deferred)
    assert take_over(spec, cursor, TRAIN_PROMPTS).deferred == used[:2]
    checkpoint = Checkpoint(version=PolicyVersion(2), weights=blob("two"), optimiser=blob("state"))
    start = StartingCheckpoint(
        job=JobId("other-1"), folder="/other", checkpoint=checkpoint, cursor=cursor
    )
    world = World(spec, [1, 2], starts_from=start)
    # of two steps that are left, the first one takes what waits
    assert issued_by(world, seed) == [2, 2]


def test_refuses_fewer_prompts_than_two_steps_may_hold() -> None:
    world = World(small_spec(prompts=3, defer_long=0.5), [1])
    world.run_out(100)
    assert world.status == "failed"
    assert f"needs 7 rows, and data.train has {TRAIN_PROMPTS}" in str(world.error)
