"""Updates learn from the same answers whenever workers idle (`algorithm.staleness: 1`)."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.specs import small_spec
from tests.simulation.walk import finish, step
from tests.simulation.world import World
from tlt.policies.keyed_random import mix
from tlt.protocol.events import RolloutFinished
from tlt.spec.config import JobSpec

_Samples = list[tuple[int, int, float, float]]
seeds = st.integers(0, 2**32 - 1)
clusters = st.lists(st.integers(1, 2), min_size=1, max_size=3)


def reward(spec: JobSpec, done: RolloutFinished) -> float:
    """Return 0 or 1, the same for every attempt: all of them write the same tokens."""
    return float(mix(spec.seed, done.step, done.prompt, done.member) % 2)


def learned(timing: int, ranks: list[int], *, seed: int, dynamic: bool) -> dict[int, _Samples]:
    """Return each update's samples; the timing decides who is fast, and which event is late."""
    spec = small_spec(
        steps=4, eval_every=2, seed=seed, dynamic_sampling=dynamic, staleness=1, train="auto"
    )
    world, chooser = World(spec, ranks, reward=reward), Random(timing)
    while not world.ended and len(world.journal) < 400:
        step(world, chooser, faults=0.0, overtaking=0.3)
    finish(world)
    return {
        version: [(each.prompt, each.member, each.reward, each.advantage) for each in plan.samples]
        for version, plan in world.checks.plans.items()
    }


@given(st.integers(0, 9), seeds, clusters, seeds, clusters, st.booleans())
def test_updates_learn_from_the_same_answers_whatever_the_timing(
    seed: int, first: int, some: list[int], second: int, others: list[int], dynamic: bool
) -> None:
    expected = learned(first, some, seed=seed, dynamic=dynamic)
    assert learned(second, others, seed=seed, dynamic=dynamic) == expected
