"""Groups that agree are replaced within their batch, whatever is lost, late or repeated.

`tests.simulation.sampling_checks` holds the invariants; random walks meet dynamic sampling, too.
"""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.incarnation import INITIAL, WorkerIncarnation
from tests.simulation.moves import Move
from tests.simulation.specs import small_spec
from tests.simulation.walk import finish, step
from tests.simulation.world import TRAIN_PROMPTS, World
from tlt.policies.run.coordinator import decide
from tlt.policies.run.run_state import Duty
from tlt.protocol.commands import IssuePrompts
from tlt.protocol.events import RolloutFinished, RolloutScored
from tlt.spec.config import JobSpec

seeds = st.integers(0, 2**32 - 1)
_FEW = settings(max_examples=max(5, settings().max_examples // 10))


def _all_agree(spec: JobSpec, done: RolloutFinished) -> float:
    return 1.0


def _prompt_0_differs(spec: JobSpec, done: RolloutFinished) -> float:
    return float(done.prompt == 0 and done.member == 0)


def _all_differ(spec: JobSpec, done: RolloutFinished) -> float:
    return float(done.member)


def _spec(**changes: Any) -> JobSpec:
    return small_spec(**{"steps": 4, "dynamic_sampling": True, **changes})


def _extra_prompts(world: World) -> set[int]:
    batch = world.state.batch
    return set() if batch is None or not batch.extra else {*list(batch.groups)[-batch.extra :]}


def _decoding_extra(world: World) -> list[WorkerIncarnation]:
    extra = _extra_prompts(world)
    return [
        incarnation
        for incarnation in world.incarnations.values()
        if any(held.prompt in extra for held in incarnation.held.values())
    ]


def _until_extra_is_decoded(world: World, chooser: Random) -> list[WorkerIncarnation]:
    while not world.ended and not (found := _decoding_extra(world)):
        step(world, chooser, faults=0.0, overtaking=0.3)
    return [] if world.ended else found


@pytest.mark.parametrize("fault", ["crash", "kill", "stop"])
@given(seed=seeds)
@_FEW
def test_a_worker_lost_in_an_extra_group_loses_nothing(fault: str, seed: int) -> None:
    chooser = Random(seed)
    world = World(_spec(seed=seed % 7), [1, 1])
    if decoding := _until_extra_is_decoded(world, chooser):
        world.do(Move(fault, (chooser.choice(decoding),)))
    finish(world)


@pytest.mark.parametrize("fault", [Move("restart"), Move("reboot"), Move("lose_blobs")], ids=str)
@given(seed=seeds)
@_FEW
def test_a_new_coordinator_goes_on_with_the_same_prompts(fault: Move, seed: int) -> None:
    chooser = Random(seed)
    world = World(_spec(seed=seed % 7), [1, 1])
    _until_extra_is_decoded(world, chooser)
    cursor = world.state.cursor
    if not world.ended:
        world.do(fault)
        assert world.state.cursor == cursor
    finish(world)


def test_a_batch_whose_groups_all_agree_ends_at_the_bound() -> None:
    """Nothing is learned, and the policy stays as it is."""
    world = World(_spec(max_num_gen_batches=1.5), [1, 1], reward=_all_agree)
    finish(world)
    replaced = world.checks.sampling.replaced
    assert {each: len(replaced[each]) for each in range(4)} == dict.fromkeys(range(4), 1)
    assert set(world.checks.contents.values()) == {INITIAL}
    assert all(not plan.samples for plan in world.checks.plans.values())


def test_a_group_that_differs_by_its_lengths_alone_is_replaced() -> None:
    world = World(_spec(), [1, 1])
    _do_all_but_scoring(world)
    state, group = world.state, world.unscored[0].prompt
    replaced: list[int | None] = []
    for done in world.unscored:
        if done.prompt == group:
            scored = _scored(done, reward=-0.01 * done.member, unpenalised=0.0)
            state, commands = decide(state, scored, 0.0)
            replaced += [each.replaces for each in commands if isinstance(each, IssuePrompts)]
    assert replaced == [group]


def _scored(done: RolloutFinished, *, reward: float, unpenalised: float) -> RolloutScored:
    return RolloutScored(
        job=done.job,
        epoch=done.epoch,
        step=done.step,
        attempt=done.attempt,
        purpose=done.purpose,
        prompt=done.prompt,
        member=done.member,
        length=done.length,
        reward=reward,
        unpenalised=unpenalised,
    )


def test_extra_prompts_end_an_epoch_within_a_batch() -> None:
    """A batch never has a prompt twice, so it ends when it has all prompts."""
    world = World(_spec(steps=3, max_num_gen_batches=9.0), [1], reward=_all_agree)
    finish(world)
    for each in range(3):
        prompts = {answer[2] for answer in world.checks.batches[each, "train"]}
        assert len(prompts) == TRAIN_PROMPTS
    assert world.state.cursor is not None
    assert world.state.cursor.epoch >= 2


def test_an_update_does_with_the_groups_that_differ() -> None:
    world = World(_spec(steps=5, max_num_gen_batches=2.0), [1, 1], reward=_prompt_0_differs)
    finish(world)
    learned = [{sample.prompt for sample in plan.samples} for plan in world.checks.plans.values()]
    assert {0} in learned
    assert all(prompts <= {0} for prompts in learned)


def test_nothing_is_replaced_where_all_groups_differ() -> None:
    plain, dynamic = (
        World(_spec(dynamic_sampling=on), [1, 1], reward=_all_differ) for on in (False, True)
    )
    finish(plain)
    finish(dynamic)
    assert dynamic.checks.contents == plain.checks.contents
    assert dynamic.checks.finished == plain.checks.finished
    assert not any(dynamic.checks.sampling.replaced.values())


def test_late_rewards_bring_idle_workers_back() -> None:
    """Each worker that trains has two slots: one of them is enough for a group of two answers."""
    world = World(_spec(train="always"), [1, 1], reward=_all_agree)
    _do_all_but_scoring(world)
    assert _duties(world) == [Duty.DRAFTER_TRAINING] * 2
    while not _extra_prompts(world):
        world.score()
        _deliver_all(world)
    assert _duties(world) == [Duty.STOPPING, Duty.DRAFTER_TRAINING]
    finish(world)


def test_an_idle_worker_decodes_an_extra_group() -> None:
    world = World(_spec(train="off"), [1, 1], reward=_all_agree)
    _do_all_but_scoring(world)
    assert _duties(world) == [Duty.IDLE] * 2
    while world.unscored:
        world.score()
    _deliver_all(world)
    assert _duties(world) == [Duty.ROLLOUT] * 2


def _do_all_but_scoring(world: World) -> None:
    for _ in range(300):
        for move in world.moves():
            if move.kind != "score" and move in world.moves():
                world.do(move)


def _deliver_all(world: World) -> None:
    while world.log:
        world.deliver()


def _duties(world: World) -> list[Duty]:
    return [known.duty for known in world.state.workers.values()]
