"""Drafters are adopted, rejected and reverted in named histories.

Of two workers the first has no prompts left and trains, while the second decodes.
"""

import msgspec
import pytest

from tests.simulation.moves import Move
from tests.simulation.training_world import (
    DECODING,
    WHOLE_STEP,
    WORK,
    TrainingWorld,
)
from tests.simulation.walk import finish
from tlt.base.id_types import WorkerId
from tlt.policies.run import coordinator, drafter_training_scheduler
from tlt.policies.run.run_state import Duty
from tlt.protocol.commands import AdoptDrafter
from tlt.protocol.events import DrafterCommitFailed, DrafterMerged
from tlt.protocol.refs import DrafterRef


def test_adopts_a_better_drafter_on_all_workers() -> None:
    world = TrainingWorld().start_training()
    world.train_delta()
    world.merge(quality=2.0)
    world.settle()
    assert world.emitted["CommitDrafter"] == 1
    assert world.emitted["AdoptDrafter"] == 2
    assert {incarnation.drafter for incarnation in world.incarnations.values()} == {
        world.state.drafter.adoption.used
    }
    finish(world)


def test_reverts_a_drafter_that_does_worse_in_rollouts() -> None:
    """The third drafter of this world does worse."""
    world = TrainingWorld().start_training()
    second, used = world.incarnations[DECODING], list[DrafterRef | None]()
    for _ in range(3):
        world.train_delta()
        world.merge(quality=1.5)
        world.settle()
        used.append(world.state.drafter.adoption.used)
        world.workers.report_decoding(second, 3200)
        world.workers.report_decoding(second, 3200)
        world.settle()
    assert world.checks.drafter.adopted == 6
    assert world.checks.drafter.reverted == 2
    assert world.state.drafter.adoption.used == used[1]
    assert {incarnation.drafter for incarnation in world.incarnations.values()} == {used[1]}
    assert used[1] is not None
    assert world.state.drafter.lineage.base.weights == used[1].weights
    finish(world)


def test_stops_training_on_a_worker_without_the_drafter_in_use() -> None:
    """Its evaluations would compare with no drafter or with an older one."""
    world = TrainingWorld().start_training()
    used = world.adopt(quality=2.0)
    world.refuse(world.trainee, used)
    assert world.state.drafter.adoption.used == used
    world.run_until(
        lambda: world.trainee.training_session is None, "stop_rank", "deliver", but=DECODING
    )
    sessions = world.state.drafter.sessions
    world.settle()
    assert world.state.workers[WorkerId("w0")].duty is Duty.IDLE
    assert world.state.drafter.sessions == sessions
    # the worker that loaded it trains
    world.run_until(
        lambda: world.incarnations[DECODING].training_session is not None,
        *WORK,
        but=WorkerId("w0"),
    )
    finish(world)


def test_reverts_a_drafter_that_no_worker_can_load() -> None:
    world = TrainingWorld().start_training()
    used = [world.adopt(quality=2.0) for _ in range(2)]
    for incarnation in world.incarnations.values():
        assert world.state.drafter.adoption.used == used[1]
        world.refuse(incarnation, used[1])
    assert world.state.drafter.adoption.used == used[0]
    assert {incarnation.drafter for incarnation in world.incarnations.values()} == {used[0]}
    assert world.state.drafter.lineage.base.weights == used[0].weights
    finish(world)


def test_trains_a_named_drafter_on_the_workers_that_can_load_it() -> None:
    world = TrainingWorld(drafter="drafter").start_training()
    world.refuse(world.trainee, None)
    world.run_until(
        lambda: world.trainee.training_session is None, "stop_rank", "deliver", but=DECODING
    )
    world.settle()
    assert world.state.workers[WorkerId("w0")].duty is Duty.IDLE
    # if no worker can load it, all start from the same weights
    world.refuse(world.incarnations[DECODING], None)
    assert all(
        drafter_training_scheduler.is_eligible(world.state, known)
        for known in world.state.workers.values()
    )
    finish(world)


def test_stops_a_worker_that_cannot_load_the_drafter_reverted_to() -> None:
    """The worker has the trained drafter, and none after the revert."""
    world = TrainingWorld(drafter="drafter").start_training()
    second = world.incarnations[DECODING]
    world.refuse(second, None)
    used = world.adopt(quality=2.0)
    # without scores the batch stays open
    world.run_until(lambda: second.training_session is not None, *(set(WORK) - {"score"}))
    assert world.state.workers[DECODING].duty is Duty.DRAFTER_TRAINING
    lost = DrafterCommitFailed(job=world.state.job, version=used.version, error="full")
    world.workers.report(world.trainee, lost)
    world.run_until(lambda: world.state.drafter.adoption.used is None, "deliver", but=DECODING)
    assert world.state.workers[DECODING].duty is Duty.STOPPING
    finish(world)


def test_retries_a_refused_drafter_in_the_next_rollout_batch() -> None:
    world = TrainingWorld().start_training()
    used = world.adopt(quality=2.0)
    world.refuse(world.trainee, used)
    assert not drafter_training_scheduler.is_eligible(
        world.state, world.state.workers[WorkerId("w0")]
    )
    world.run_until(lambda: world.state.step == 1, *WHOLE_STEP)
    assert world.state.drafter.adoption.used == used
    assert drafter_training_scheduler.is_eligible(world.state, world.state.workers[WorkerId("w0")])
    finish(world)


@pytest.mark.parametrize("tells", [0, 2])
def test_reverts_a_drafter_that_cannot_be_committed(tells: int) -> None:
    world = TrainingWorld().start_training()
    second, used = world.incarnations[DECODING], list[DrafterRef | None]()
    for full in (False, True):
        world.drafter_blobs.disk_is_full = full
        world.train_delta()
        world.merge(quality=1.5)
        world.run_until(lambda: world.state.drafter.lineage.merge is None, "deliver")
        used.append(world.state.drafter.adoption.used)
        world.settle()
        # either often enough to know its live acceptance, or never
        for _ in range(tells):
            world.workers.report_decoding(second, 3200)
        world.settle()
    state = world.state.drafter
    assert used[0] != used[1]
    assert state.adoption.used == used[0]
    assert {incarnation.drafter for incarnation in world.incarnations.values()} == {used[0]}
    assert used[0] is not None
    assert state.lineage.base.weights == used[0].weights
    assert used[0].weights.digest in world.committed
    # training restarts from it, with the evaluations of that version alone
    assert world.trainee.training_session is not None
    assert world.trainee.training_session.base == state.lineage.base
    assert [mark.version for mark in state.evidence.evaluations] == [used[0].version]
    assert state.evidence.failures == 1
    assert state.evidence.rests_until == world.state.step + 8
    finish(world)


@pytest.mark.parametrize("learned", ["at once", "after the next"])
def test_never_falls_back_on_an_uncommitted_drafter(learned: str) -> None:
    world = TrainingWorld().start_training()
    second = world.incarnations[DECODING]
    world.drafter_blobs.disk_is_full = True
    world.train_delta()
    world.merge(quality=1.5)
    world.run_until(lambda: world.state.drafter.adoption.used is not None, "deliver")
    lost = next(e for e in (p.event for p in world.log) if isinstance(e, DrafterCommitFailed))
    if learned == "at once":
        world.settle()
        assert world.state.drafter.adoption.used is None
    else:
        world.log = [posted for posted in world.log if posted.event != lost]
        world.drafter_blobs.disk_is_full = False
        world.settle()
        world.workers.report_decoding(second, 3200)
        world.workers.report_decoding(second, 3200)
        world.settle()
        world.train_delta()
        world.merge(quality=1.5)
        world.settle()
        assert world.state.drafter.adoption.fallback is not None
        assert world.state.drafter.adoption.fallback.version == lost.version
        world.post("coordinator", lost)
        world.settle()
        assert world.state.drafter.adoption.used is not None
    assert world.state.drafter.adoption.fallback is None
    assert world.state.drafter.adoption.fallback_live == {}
    assert world.state.drafter.adoption.previous is None
    finish(world)


def test_keeps_the_drafter_in_use_after_a_restart_from_it() -> None:
    """After a restart the base is the drafter in use: one blob that two references need."""
    world = TrainingWorld().start_training()
    used = world.adopt(quality=2.0)
    world.train_delta()
    world.merge(quality=0.5)
    world.settle()
    assert world.state.drafter.adoption.used == used
    assert world.state.drafter.lineage.base.weights == used.weights
    for _ in range(2):
        world.train_delta()
        world.merge(quality=0.97)
        world.settle()
        assert used.weights.digest in world.flight
    finish(world)


def test_rejects_a_drafter_of_another_shape() -> None:
    world = TrainingWorld().start_training()
    world.train_delta()
    world.merge(quality=2.0)
    world.settle()
    used = world.state.drafter.adoption.used
    world.train_delta()
    world.run_until(
        lambda: world.trainee.merge is not None, "deliver", "obey", "train", "send_delta"
    )
    world.do(Move("merge_other", (world.trainee,)))
    world.settle()
    assert world.state.drafter.adoption.used == used
    assert used is not None
    assert world.state.drafter.lineage.base.weights == used.weights
    finish(world)


def test_ignores_evaluations_without_a_finite_accept_length() -> None:
    world = TrainingWorld().start_training()
    world.train_delta()
    world.merge(quality=2.0)
    event = world.log[-1].event
    assert isinstance(event, DrafterMerged)
    for evaluation in (
        msgspec.structs.replace(event.evaluation, accept_length=float("nan")),
        msgspec.structs.replace(event.evaluation, answers=0),
    ):
        state = world.state
        for posted in world.log[:-1]:
            state, _ = coordinator.decide(state, posted.event, 0.0)
        after, commands = coordinator.decide(
            state, msgspec.structs.replace(event, evaluation=evaluation), 0.0
        )
        assert after.drafter.adoption.used is None
        assert not after.drafter.evidence.evaluations
        assert not any(isinstance(command, AdoptDrafter) for command in commands)
