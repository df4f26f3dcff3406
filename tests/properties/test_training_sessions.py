"""Training sessions, deltas and merges in named histories.

Of two workers the first has no prompts left and trains, while the second decodes.
"""

from random import Random

import msgspec

from tests.simulation import walk
from tests.simulation.moves import Move
from tests.simulation.specs import small_spec
from tests.simulation.training_world import (
    DECODING,
    WORK,
    TrainingWorld,
    diverged,
    training_stopped,
)
from tests.simulation.walk import finish
from tests.simulation.world import World
from tlt.base.id_types import WorkerId
from tlt.policies.run.run_state import Duty
from tlt.protocol.events import WorkerIdled


def test_stops_training_before_a_worker_takes_requeued_prompts() -> None:
    world = TrainingWorld().start_training()
    world.workers.crash(world.incarnations[DECODING])
    world.settle()
    assert world.state.workers[WorkerId("w0")].duty is Duty.STOPPING
    assert world.trainee.assignment is None
    world.run_until(lambda: world.trainee.assignment is not None, "stop_rank", "deliver", "obey")
    finish(world)


def test_replaces_a_worker_that_never_stops_training() -> None:
    world = TrainingWorld().start_training()
    world.do(Move("hang", (world.trainee,)))
    world.workers.crash(world.incarnations[DECODING])
    finish(world)
    assert world.state.losses == 2


def test_starts_no_session_without_new_answers() -> None:
    """A worker is commanded to train again once for every answer that others finish."""
    world = TrainingWorld(prompts=2, group=2)
    second = world.incarnations[DECODING]
    world.run_until(lambda: second.assignment is not None, "obey", "deliver")
    assert second.assignment is not None
    while world.prompts.queue_of(second.assignment):
        world.do(Move("pull", (second,)))
    for _ in range(50):
        moves = [m for m in world.moves() if m.kind in ("idle", "train", "obey", "deliver")]
        for move in moves:
            if move in world.moves():
                world.do(move)
    assert world.emitted["TrainDrafter"] == 1
    world.do(Move("finish", (second, next(iter(second.held)))))
    world.settle()
    assert world.emitted["TrainDrafter"] == 2
    finish(world)


def test_releases_a_delta_that_a_later_one_overtook() -> None:
    world = TrainingWorld(merge_every=100).start_training()
    world.train_delta()
    world.train_delta()
    late, early = len(world.log) - 2, len(world.log) - 1
    world.deliver(early)
    world.deliver(late)
    assert "delta 1.0.0" not in world.flight
    assert "delta 1.0.1" in world.flight
    finish(world)


def test_releases_what_a_cancelled_merge_made() -> None:
    world = TrainingWorld().start_training()
    world.train_delta()
    world.merge(quality=2.0)
    given_up = world.state.drafter.lineage.merge
    assert given_up is not None
    world.post("w0", training_stopped(world))
    world.deliver(len(world.log) - 1)
    # the next session requests the merge at once, because the deltas are still unmerged
    again = world.state.drafter.lineage.merge
    assert again is not None
    assert again.version > given_up.version
    assert again.deltas == given_up.deltas
    made = [digest for digest in world.flight if digest.startswith(("training base", "drafter"))]
    assert len(made) == 2
    world.deliver()
    assert not set(made) & world.flight


def test_adds_no_discarded_work_after_a_restart() -> None:
    world = TrainingWorld(merge_every=4).start_training()
    world.train_delta()
    world.merge(quality=2.0)
    world.settle()
    world.train_delta()
    world.do(Move("lose_blobs"))
    world.settle()
    assert world.state.drafter.lineage.base.root > 1
    assert world.state.drafter.lineage.base.merged == {}
    world.do(Move("train", (world.trainee, 0)))
    assert not world.trainee.training_ranks[0].unmerged
    finish(world)


def test_merges_a_late_delta_once() -> None:
    """Meanwhile its member trains from a newer base and adds to that."""
    world = TrainingWorld((2, 1)).start_training()
    world.train_delta(rank=0)
    world.run_until(lambda: world.trainee.merge is not None, "deliver", "obey")
    world.train_delta(rank=1)
    world.settle()
    for _ in range(2):
        world.drafter_training.quality = 0.97
        world.do(Move("merge", (world.trainee,)))
        world.settle()
        world.train_delta(rank=1)
        assert world.trainee.training_ranks[1].unmerged
        world.train_delta(rank=0)
        world.run_until(lambda: world.trainee.merge is not None, "deliver", "obey")
    assert "1.1" in world.state.drafter.lineage.base.merged
    finish(world)


def test_stops_a_member_that_never_merges() -> None:
    world = TrainingWorld().start_training()
    world.train_delta()
    world.run_until(lambda: world.trainee.merge is not None, "deliver", "obey")
    world.do(Move("forget_merge", (world.trainee,)))
    for _ in range(100):
        if world.emitted["StopDrafterTraining"]:
            break
        world.train_delta()
        world.settle()
    assert world.emitted["StopDrafterTraining"] == 1
    assert len(world.state.drafter.lineage.deltas) < 20
    again = (*WORK, "stop_rank", "train", "send_delta")
    world.run_until(lambda: world.emitted["MergeDrafter"] == 2, *again, but=DECODING)
    finish(world)


def test_restarts_from_the_drafter_in_use_if_the_base_is_unreadable() -> None:
    world = TrainingWorld().start_training()
    world.train_delta()
    world.merge(quality=2.0)
    world.settle()
    base = world.state.drafter.lineage.base
    assert base.weights is not None
    world.do(Move("lose_blob", (base.weights.digest,)))
    world.run_until(lambda: world.emitted["StopDrafterTraining"] > 0, "train", "deliver")
    assert world.state.drafter.lineage.base.root > base.version
    finish(world)


def test_ignores_divergence_of_a_replaced_base() -> None:
    """A slow member cannot read a base that has been replaced."""
    world = TrainingWorld().start_training()
    world.train_delta()
    world.merge(quality=2.0)
    world.settle()
    base = world.state.drafter.lineage.base
    world.post("w0", diverged(world, base=0))
    world.settle()
    assert world.state.drafter.lineage.base == base
    # the member has been sent the new base, and trains on
    assert world.state.workers[WorkerId("w0")].duty is Duty.DRAFTER_TRAINING
    assert world.trainee.training_session is not None
    assert world.trainee.training_session.base == base
    finish(world)


def test_rests_after_repeated_divergence() -> None:
    """Training starts again only after a new answer."""
    world = TrainingWorld(train="auto", merge_every=8, prompts=4).start_training()
    rests: list[int] = []
    for _ in range(3):
        world.post("w0", diverged(world, base=world.state.drafter.lineage.base.version))
        world.settle()
        rests.append(world.state.drafter.evidence.rests_until)
        training_session = world.state.drafter.sessions
        world.run_until(lambda: world.trainee.training_session is None, "stop_rank")
        world.settle()
        assert world.state.drafter.sessions == training_session
        second = world.incarnations[DECODING]
        if rests[-1] == 0:
            while not second.held:
                world.do(Move("pull", (second,)))
            world.do(Move("finish", (second, next(iter(second.held)))))
            world.settle()
    assert rests == [0, 0, 1]
    finish(world)


def test_counts_a_repeated_idle_report_once() -> None:
    """A repeated report after the session must not start another one."""
    world = TrainingWorld(merge_every=100).start_training()
    idled = next(e for e in reversed(world.delivered) if isinstance(e, WorkerIdled))
    world.post("w0", diverged(world, base=0))
    world.settle()
    world.run_until(lambda: world.trainee.training_session is None, "stop_rank")
    world.settle()
    world.expect_nothing(idled)
    finish(world)


def test_keeps_the_state_small_over_a_long_job() -> None:
    """Workers come and go, and drafters get better and worse."""
    world = TrainingWorld((1, 2), train="always", steps=80, prompts=1, group=2, checkpoint_every=1)
    sizes: list[int] = []
    step = 0
    chooser = Random(0)
    while not world.ended:
        walk.step(world, chooser, faults=0.0, overtaking=0.1)
        assert len(world.state.drafter.lineage.deltas) <= 2 * 16 * 3
        if world.state.step > step:
            step = int(world.state.step)
            sizes.append(len(msgspec.json.encode(world.state.drafter)))
            if step % 3 == 0:
                world.workers.crash(next(iter(world.incarnations.values())))
    assert world.drafter_training.merges > 15
    assert max(sizes[40:]) < 1.5 * max(sizes[10:40])


def test_trains_nothing_if_off() -> None:
    world = World(small_spec(), [1, 1])
    finish(world)
    assert world.state.drafter.sessions == 0
