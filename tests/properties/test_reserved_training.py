"""Reserved time for drafter training ends in spite of losses and faults."""

import pytest

from tests.simulation.moves import Move
from tests.simulation.training_world import (
    TRAINING_MOVES,
    WORK,
    TrainingWorld,
    reserve_time,
)
from tests.simulation.walk import finish
from tlt.base.id_types import WorkerId
from tlt.policies.run.run_state import Phase


def test_ends_reserved_time() -> None:
    world = reserve_time(merge_every=50)
    world.drafter_training.quality = 2.0
    finish(world)
    assert world.checks.drafter.adopted > 0


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (1, 3)])
def test_reserves_time_for_every_rank(ranks: tuple[int, ...]) -> None:
    world = reserve_time(ranks)
    per_rank = world.state.drafter.progress.reserved_seconds / sum(ranks)
    readable = world.state.drafter.progress.learnable_micro_batches
    assert per_rank == pytest.approx(min(64.0, readable / (sum(ranks) * 10.0 * 0.85)), rel=0.2)


def test_ends_reserved_time_early_if_it_turns_out_not_to_pay() -> None:
    world = reserve_time(merge_every=1, group=6)
    reserved = world.state.drafter.progress.reserved_seconds
    world.drafter_training.quality = 1.0
    world.run_until(lambda: world.state.phase is Phase.POLICY_UPDATE, *WORK, *TRAINING_MOVES)
    assert world.state.drafter.progress.reserved_seconds > reserved / 2
    finish(world)


def test_counts_idle_and_reserved_micro_batches_apart() -> None:
    idle = TrainingWorld().start_training()
    idle.train_delta()
    idle.settle()
    free = idle.state.drafter.progress
    assert free.idle_micro_batches == free.micro_batches > 0
    assert free.tokens_read == 1024 * free.micro_batches
    world = reserve_time(merge_every=50)
    before = world.state.drafter.progress
    for incarnation in world.incarnations.values():
        world.train_delta(incarnation=incarnation)
    world.settle()
    after = world.state.drafter.progress
    assert after.micro_batches > before.micro_batches
    assert after.idle_micro_batches == before.idle_micro_batches
    assert after.answer_tokens > 0


def test_does_not_wait_for_a_lone_worker_that_started_again() -> None:
    """The worker was never reported lost."""
    world = reserve_time((1,))
    world.do(Move("kill", (world.trainee,)))
    world.do(Move("come_back", (WorkerId("w0"),)))
    finish(world)


@pytest.mark.parametrize("fault", ["lose_blobs", "reboot", "restart"])
def test_ends_reserved_time_though_all_deltas_are_lost(fault: str) -> None:
    world = reserve_time(merge_every=50)
    for incarnation in world.incarnations.values():
        world.train_delta(incarnation=incarnation)
    world.settle()
    world.do(Move(fault))
    finish(world)


def test_ends_reserved_time_though_no_member_merges() -> None:
    world = reserve_time((2, 1), merge_every=1)
    for _ in range(4000):
        if world.state.phase is not Phase.RESERVED_TRAINING:
            break
        for move in world.moves():
            if move.kind != "merge" and move in world.moves():
                world.do(move)
        for incarnation in list(world.incarnations.values()):
            incarnation.merge = None
    assert world.state.phase is not Phase.RESERVED_TRAINING
    finish(world)
