"""The drafter's training, in named histories: what each of them once did to it, it does no more.

Two workers, of whom the first is through with its prompts and trains while the second decodes.
"""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, Literal

import msgspec
import pytest

from tests.simulation import walk
from tests.simulation.incarnation import WorkerIncarnation
from tests.simulation.specs import small_spec
from tests.simulation.walk import finish
from tests.simulation.world import Move, World
from tlt.ids import NAMED, WorkerId
from tlt.policies import coordinator
from tlt.policies.drafter import scheduler, training_sessions
from tlt.policies.drafter.live_acceptance import ChainTally
from tlt.policies.job.run_state import Duty, Phase, Turn
from tlt.protocol.commands import AdoptDrafter, RunCommand
from tlt.protocol.events import (
    DrafterCommitFailed,
    DrafterDiverged,
    DrafterMerged,
    DrafterRefused,
    DrafterTrainingStopped,
    WorkerIdled,
)
from tlt.protocol.refs import DrafterRef

_DECODES = WorkerId("w1")


class Classroom(World):
    """A world that is told what to do by the names of its moves, and remembers all commands."""

    def __init__(
        self,
        ranks: tuple[int, ...] = (1, 1),
        train: Literal["auto", "always"] = "always",
        **spec: Any,
    ) -> None:
        self.commands: list[RunCommand] = []
        self.told = Counter[str]()
        spec = {"steps": 3, "merge_every": 1, **spec}
        super().__init__(small_spec(train=train, **spec), ranks, self._decide)

    def _decide(self, state: Any, event: Any, now: float) -> Any:
        after, commands = coordinator.decide(state, event, now)
        if now >= 0.0:
            self.commands += commands
            self.told.update(type(command).__name__ for command in commands)
        return after, commands

    @property
    def pupil(self) -> WorkerIncarnation:
        return self.lives[WorkerId("w0")]

    def go(self, until: Callable[[], bool], *kinds: str, but: WorkerId | None = None) -> None:
        """All moves of these kinds, again and again; `but`: this one finishes no answer."""
        for _ in range(1000):
            if until():
                return
            for move in self.moves():
                lives = [arg for arg in move.args if isinstance(arg, WorkerIncarnation)]
                waits = move.kind == "finish" and any(life.worker == but for life in lives)
                if move.kind in kinds and not waits and move in self.moves():
                    self.do(move)
                    if until():
                        return
        raise AssertionError(self.summary())

    def settle(self) -> None:
        """Everything that was said is heard."""
        while found := [m for m in self.moves() if m.kind in ("deliver", "obey")]:
            self.do(found[0])

    def open_school(self) -> "Classroom":
        second = self.lives[_DECODES]
        self.go(lambda: second.assignment is not None, "obey", "deliver")
        self.do(Move("pull", (second,)))
        self.go(lambda: self.pupil.training_session is not None, *_WORK, but=_DECODES)
        return self

    def teach(self, rank: int = 0, life: WorkerIncarnation | None = None) -> None:
        """One delta."""
        life = life or self.pupil
        self.do(Move("study", (life, rank)))
        self.do(Move("hand_in", (life, rank)))

    def merge(self, quality: float) -> None:
        self.school.quality = quality
        self.go(lambda: self.pupil.merge is not None, "deliver", "obey", "study", "hand_in")
        self.do(Move("merge", (self.pupil,)))

    def adopt(self, quality: float) -> DrafterRef:
        """What one delta makes of the drafter."""
        self.teach()
        self.merge(quality)
        self.settle()
        used = self.state.drafter.adoption.used
        assert used is not None
        return used

    def refuse(self, life: WorkerIncarnation, drafter: DrafterRef | None) -> None:
        """As one whose host reads something else."""
        version = NAMED if drafter is None else drafter.version
        said = DrafterRefused(
            job=self.state.job,
            worker=life.worker,
            incarnation=life.incarnation,
            error="torn",
            version=version,
        )
        self.say(life, said)
        self.settle()


_WORK = ("obey", "deliver", "pull", "finish", "idle", "score", "start")
# with all that ends a round and begins the next
_ROUND = (*_WORK, "dismiss", "collect", "report")


def test_a_drafter_that_got_better_is_adopted_by_all() -> None:
    world = Classroom().open_school()
    world.teach()
    world.merge(quality=2.0)
    world.settle()
    assert world.told["CommitDrafter"] == 1
    assert world.told["AdoptDrafter"] == 2
    assert {life.drafter for life in world.lives.values()} == {world.state.drafter.adoption.used}
    finish(world)


def test_a_drafter_that_does_worse_in_rollouts_gives_way_to_the_one_before() -> None:
    """Of this world's drafters the third one does."""
    world = Classroom().open_school()
    second, used = world.lives[_DECODES], list[DrafterRef | None]()
    for _ in range(3):
        world.teach()
        world.merge(quality=1.5)
        world.settle()
        used.append(world.state.drafter.adoption.used)
        world.tell(second)
        world.tell(second)
        world.settle()
    assert world.checks.adopted == 6
    assert world.checks.returned == 2
    assert world.state.drafter.adoption.used == used[1]
    assert {life.drafter for life in world.lives.values()} == {used[1]}
    assert used[1] is not None
    assert world.state.drafter.lineage.base.weights == used[1].weights
    finish(world)


def test_who_cannot_load_the_drafter_in_use_trains_no_more() -> None:
    """It would measure what it made against nothing, or against an older one."""
    world = Classroom().open_school()
    used = world.adopt(quality=2.0)
    world.refuse(world.pupil, used)
    assert world.state.drafter.adoption.used == used
    world.go(lambda: world.pupil.training_session is None, "dismiss", "deliver", but=_DECODES)
    lessons_so_far = world.state.drafter.progress.sessions
    world.settle()
    assert world.state.workers[WorkerId("w0")].duty is Duty.IDLE
    assert world.state.drafter.progress.sessions == lessons_so_far
    # who has it goes on
    world.go(lambda: world.lives[_DECODES].training_session is not None, *_WORK, but=WorkerId("w0"))
    finish(world)


def test_what_nobody_can_load_gives_way_to_the_one_before() -> None:
    world = Classroom().open_school()
    used = [world.adopt(quality=2.0) for _ in range(2)]
    for life in world.lives.values():
        assert world.state.drafter.adoption.used == used[1]
        world.refuse(life, used[1])
    assert world.state.drafter.adoption.used == used[0]
    assert {life.drafter for life in world.lives.values()} == {used[0]}
    assert world.state.drafter.lineage.base.weights == used[0].weights
    finish(world)


def test_a_named_drafter_that_one_cannot_load_is_trained_by_the_other() -> None:
    world = Classroom(drafter="drafter").open_school()
    world.refuse(world.pupil, None)
    world.go(lambda: world.pupil.training_session is None, "dismiss", "deliver", but=_DECODES)
    world.settle()
    assert world.state.workers[WorkerId("w0")].duty is Duty.IDLE
    # if nobody can, all begin with the same one
    world.refuse(world.lives[_DECODES], None)
    assert all(
        training_sessions.is_eligible(world.state, known) for known in world.state.workers.values()
    )
    finish(world)


def test_who_lacks_what_is_returned_to_trains_no_more() -> None:
    """It has got the drafter that was trained, and with that away it has none."""
    world = Classroom(drafter="drafter").open_school()
    second = world.lives[_DECODES]
    world.refuse(second, None)
    used = world.adopt(quality=2.0)
    # the round stays open for as long as nobody scores
    world.go(lambda: second.training_session is not None, *(set(_WORK) - {"score"}))
    assert world.state.workers[_DECODES].duty is Duty.DRAFTER_TRAINING
    lost = DrafterCommitFailed(job=world.state.job, version=used.version, error="full")
    world.say(world.pupil, lost)
    world.go(lambda: world.state.drafter.adoption.used is None, "deliver", but=_DECODES)
    assert world.state.workers[_DECODES].duty is Duty.STOPPING
    finish(world)


def test_who_could_not_load_the_drafter_tries_again_in_the_next_round() -> None:
    world = Classroom().open_school()
    used = world.adopt(quality=2.0)
    world.refuse(world.pupil, used)
    assert not training_sessions.is_eligible(world.state, world.state.workers[WorkerId("w0")])
    world.go(lambda: world.state.step == 1, *_ROUND)
    assert world.state.drafter.adoption.used == used
    assert training_sessions.is_eligible(world.state, world.state.workers[WorkerId("w0")])
    finish(world)


@pytest.mark.parametrize("tells", [0, 2])
def test_a_drafter_that_cannot_be_kept_gives_way_to_the_one_before(tells: int) -> None:
    world = Classroom().open_school()
    second, used = world.lives[_DECODES], list[DrafterRef | None]()
    for full in (False, True):
        world.school.disk_is_full = full
        world.teach()
        world.merge(quality=1.5)
        world.go(lambda: world.state.drafter.lineage.merge is None, "deliver")
        used.append(world.state.drafter.adoption.used)
        world.settle()
        # so often that it is known what it comes to, or not
        for _ in range(tells):
            world.tell(second)
        world.settle()
    state = world.state.drafter
    assert used[0] != used[1]
    assert state.adoption.used == used[0]
    assert {life.drafter for life in world.lives.values()} == {used[0]}
    assert used[0] is not None
    assert state.lineage.base.weights == used[0].weights
    assert used[0].weights.digest in world.committed
    # it goes on from there, with what is known of that one alone
    assert world.pupil.training_session is not None
    assert world.pupil.training_session.base == state.lineage.base
    assert [mark.version for mark in state.evidence.evaluations] == [used[0].version]
    assert state.evidence.failures == 1
    assert state.evidence.rest_until == world.state.step + 8
    finish(world)


@pytest.mark.parametrize("heard", ["at once", "after the next"])
def test_nobody_falls_back_on_a_drafter_that_was_not_kept(heard: str) -> None:
    world = Classroom().open_school()
    second = world.lives[_DECODES]
    world.school.disk_is_full = True
    world.teach()
    world.merge(quality=1.5)
    world.go(lambda: world.state.drafter.adoption.used is not None, "deliver")
    lost = next(e for e in (p.event for p in world.log) if isinstance(e, DrafterCommitFailed))
    if heard == "at once":
        world.settle()
        assert world.state.drafter.adoption.used is None
    else:
        world.log = [posted for posted in world.log if posted.event != lost]
        world.school.disk_is_full = False
        world.settle()
        world.tell(second)
        world.tell(second)
        world.settle()
        world.teach()
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


def test_rollouts_tell_what_a_named_drafter_comes_to() -> None:
    world = Classroom(train="auto", drafter="/drafter", prompts=4)
    second = world.lives[_DECODES]
    world.go(lambda: second.assignment is not None, "obey", "deliver")
    world.do(Move("pull", (second,)))
    for _ in range(2):
        world.tell(second)
    world.settle()
    known = world.state.drafter.evidence.curve
    assert known is not None
    assert known.now == pytest.approx(2.53, abs=0.01)
    # it is reckoned again where a step begins
    lately = {"2 plain": ChainTally(rows=5000, tokens=8000)}
    turn = Turn(world.state, 0.0)
    evidence = msgspec.structs.replace(world.state.drafter.evidence, named_live=lately)
    turn.set_drafter(evidence=evidence)
    scheduler.open_step(turn, [])
    expected = turn.state.drafter.evidence.curve
    assert expected is not None
    assert expected.now < known.now
    assert expected.plateau == known.plateau
    finish(world)


def test_who_is_needed_stops_first() -> None:
    """Prompts go back to the queue: the worker that trains decodes when it has said so."""
    world = Classroom().open_school()
    world.crash(world.lives[_DECODES])
    world.settle()
    assert world.state.workers[WorkerId("w0")].duty is Duty.STOPPING
    assert world.pupil.assignment is None
    world.go(lambda: world.pupil.assignment is not None, "dismiss", "deliver", "obey")
    finish(world)


def test_a_worker_that_never_stops_is_replaced() -> None:
    world = Classroom().open_school()
    world.do(Move("deafen", (world.pupil,)))
    world.crash(world.lives[_DECODES])
    finish(world)
    assert world.state.losses == 2


def test_with_nothing_to_learn_from_nobody_asks_again_and_again() -> None:
    """It is asked once more for every answer that others finish."""
    world = Classroom(prompts=2, group=2)
    second = world.lives[_DECODES]
    world.go(lambda: second.assignment is not None, "obey", "deliver")
    while world.queue:
        world.do(Move("pull", (second,)))
    for _ in range(50):
        moves = [m for m in world.moves() if m.kind in ("idle", "study", "obey", "deliver")]
        for move in moves:
            if move in world.moves():
                world.do(move)
    assert world.told["TrainDrafter"] == 1
    world.do(Move("finish", (second, next(iter(second.held)))))
    world.settle()
    assert world.told["TrainDrafter"] == 2
    finish(world)


def test_what_comes_late_is_let_go_of() -> None:
    """A delta that a later one has overtaken, a trunk of a merge that was given up."""
    world = Classroom(merge_every=100).open_school()
    world.teach()
    world.teach()
    late, early = len(world.log) - 2, len(world.log) - 1
    world.deliver(early)
    world.deliver(late)
    assert "delta 1.0.0" not in world.flight
    assert "delta 1.0.1" in world.flight
    finish(world)


def test_a_merge_that_was_given_up_leaves_nothing() -> None:
    world = Classroom().open_school()
    world.teach()
    world.merge(quality=2.0)
    given_up = world.state.drafter.lineage.merge
    assert given_up is not None
    world.post("w0", _preempted(world))
    world.deliver(len(world.log) - 1)
    # who begins after that is asked at once: what was handed in is still to be merged
    again = world.state.drafter.lineage.merge
    assert again is not None
    assert again.version > given_up.version
    assert again.deltas == given_up.deltas
    made = [digest for digest in world.flight if digest.startswith(("trunk", "drafter"))]
    assert len(made) == 2
    world.deliver()
    assert not set(made) & world.flight


def test_what_is_used_is_kept_when_a_trunk_grows_past_it() -> None:
    """After a new beginning the trunk is what is used: one blob, and two that need it."""
    world = Classroom().open_school()
    used = world.adopt(quality=2.0)
    world.teach()
    world.merge(quality=0.5)
    world.settle()
    assert world.state.drafter.adoption.used == used
    assert world.state.drafter.lineage.base.weights == used.weights
    for _ in range(2):
        world.teach()
        world.merge(quality=0.97)
        world.settle()
        assert used.weights.digest in world.flight
    finish(world)


def test_after_a_new_beginning_nobody_adds_what_was_given_up() -> None:
    world = Classroom(merge_every=4).open_school()
    world.teach()
    world.merge(quality=2.0)
    world.settle()
    world.teach()
    world.do(Move("lose_blobs"))
    world.settle()
    assert world.state.drafter.lineage.base.root > 1
    assert world.state.drafter.lineage.base.merged == {}
    world.do(Move("study", (world.pupil, 0)))
    assert not world.pupil.pupils[0].unmerged
    finish(world)


def test_a_delta_that_is_merged_a_trunk_later_is_merged_once() -> None:
    """Its member stands on the trunk between the two by then, and adds to that."""
    world = Classroom((2, 1)).open_school()
    world.teach(rank=0)
    world.go(lambda: world.pupil.merge is not None, "deliver", "obey")
    world.teach(rank=1)
    world.settle()
    for _ in range(2):
        world.school.quality = 0.97
        world.do(Move("merge", (world.pupil,)))
        world.settle()
        world.teach(rank=1)
        assert world.pupil.pupils[1].unmerged
        world.teach(rank=0)
        world.go(lambda: world.pupil.merge is not None, "deliver", "obey")
    assert "1.1" in world.state.drafter.lineage.base.merged
    finish(world)


def test_a_drafter_of_another_shape_is_not_adopted() -> None:
    world = Classroom().open_school()
    world.teach()
    world.merge(quality=2.0)
    world.settle()
    used = world.state.drafter.adoption.used
    world.teach()
    world.go(lambda: world.pupil.merge is not None, "deliver", "obey", "study", "hand_in")
    world.do(Move("merge_other", (world.pupil,)))
    world.settle()
    assert world.state.drafter.adoption.used == used
    assert used is not None
    assert world.state.drafter.lineage.base.weights == used.weights
    finish(world)


def test_a_merge_that_nobody_makes_is_not_waited_for() -> None:
    world = Classroom().open_school()
    world.teach()
    world.go(lambda: world.pupil.merge is not None, "deliver", "obey")
    world.do(Move("forget_merge", (world.pupil,)))
    for _ in range(100):
        if world.told["StopDrafterTraining"]:
            break
        world.teach()
        world.settle()
    assert world.told["StopDrafterTraining"] == 1
    assert len(world.state.drafter.lineage.deltas) < 20
    again = (*_WORK, "dismiss", "study", "hand_in")
    world.go(lambda: world.told["MergeDrafter"] == 2, *again, but=_DECODES)
    finish(world)


def test_a_trunk_that_cannot_be_read_is_given_up() -> None:
    world = Classroom().open_school()
    world.teach()
    world.merge(quality=2.0)
    world.settle()
    base = world.state.drafter.lineage.base
    assert base.weights is not None
    world.do(Move("vanish", (base.weights.digest,)))
    world.go(lambda: world.told["StopDrafterTraining"] > 0, "study", "deliver")
    assert world.state.drafter.lineage.base.root > base.version
    finish(world)


def test_what_was_replaced_spoils_nothing() -> None:
    """Who is slow cannot read the trunk that it was told of: there is another by now."""
    world = Classroom().open_school()
    world.teach()
    world.merge(quality=2.0)
    world.settle()
    base = world.state.drafter.lineage.base
    world.post("w0", _spoiled(world, base=0))
    world.settle()
    assert world.state.drafter.lineage.base == base
    # it has been told of that one, and goes on with it
    assert world.state.workers[WorkerId("w0")].duty is Duty.DRAFTER_TRAINING
    assert world.pupil.training_session is not None
    assert world.pupil.training_session.base == base
    finish(world)


def test_who_spoils_in_vain_rests() -> None:
    """And is not asked again before there is something new."""
    world = Classroom(train="auto", merge_every=100, prompts=4).open_school()
    rests: list[int] = []
    for _ in range(3):
        world.post("w0", _spoiled(world, base=world.state.drafter.lineage.base.version))
        world.settle()
        rests.append(world.state.drafter.evidence.rest_until)
        training_session = world.state.drafter.progress.sessions
        world.go(lambda: world.pupil.training_session is None, "dismiss")
        world.settle()
        assert world.state.drafter.progress.sessions == training_session
        second = world.lives[_DECODES]
        if rests[-1] == 0:
            while not second.held:
                world.do(Move("pull", (second,)))
            world.do(Move("finish", (second, next(iter(second.held)))))
            world.settle()
    assert rests == [0, 0, 1]
    finish(world)


def test_that_it_found_nothing_to_do_counts_once() -> None:
    """Said again after its lesson, it would begin another."""
    world = Classroom(merge_every=100).open_school()
    idled = next(e for e in reversed(world.delivered) if isinstance(e, WorkerIdled))
    world.post("w0", _spoiled(world, base=0))
    world.settle()
    world.go(lambda: world.pupil.training_session is None, "dismiss")
    world.settle()
    world.expect_nothing(idled)
    finish(world)


# --- seconds that are bought ----------------------------------------------------------------------


def _bought(ranks: tuple[int, ...] = (1, 1), **spec: Any) -> Classroom:
    """Everybody trains."""
    world = Classroom(ranks, train="auto", steps=12, **spec)
    world.go(lambda: world.state.phase is Phase.RESERVED_TRAINING, *_WORK)
    world.settle()
    assert all(life.training_session is not None for life in world.lives.values())
    return world


def test_bought_seconds_come_to_an_end() -> None:
    world = _bought(merge_every=50)
    world.school.quality = 2.0
    finish(world)
    assert world.checks.adopted > 0


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (1, 3)])
def test_seconds_are_bought_for_every_rank(ranks: tuple[int, ...]) -> None:
    per_rank = _bought(ranks).state.drafter.progress.reserved_seconds / sum(ranks)
    assert per_rank in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


def test_what_turns_out_not_to_pay_is_not_bought_any_longer() -> None:
    world = _bought(merge_every=1)
    bought = world.state.drafter.progress.reserved_seconds
    world.school.quality = 1.0
    world.go(lambda: world.state.phase is Phase.POLICY_UPDATE, *_WORK, *_SCHOOL)
    assert world.state.drafter.progress.reserved_seconds > bought / 2
    finish(world)


def test_what_is_learned_counts_by_whether_it_was_paid_for() -> None:
    idle = Classroom().open_school()
    idle.teach()
    idle.settle()
    free = idle.state.drafter.progress
    assert free.idle_micro_batches == free.micro_batches > 0
    assert free.tokens_read == 1024 * free.micro_batches
    world = _bought(merge_every=50)
    before = world.state.drafter.progress
    for life in world.lives.values():
        world.teach(life=life)
    world.settle()
    after = world.state.drafter.progress
    assert after.micro_batches > before.micro_batches
    assert after.idle_micro_batches == before.idle_micro_batches
    assert after.answer_tokens > 0


_SCHOOL = ("study", "hand_in", "merge", "dismiss")


def test_a_lone_worker_that_starts_again_is_not_waited_for() -> None:
    """Nobody had said that it was gone."""
    world = _bought((1,))
    world.do(Move("kill", (world.pupil,)))
    world.do(Move("come_back", (WorkerId("w0"),)))
    finish(world)


@pytest.mark.parametrize("fault", ["lose_blobs", "reboot", "restart"])
def test_bought_seconds_end_though_everything_learned_is_lost(fault: str) -> None:
    world = _bought(merge_every=50)
    for life in world.lives.values():
        world.teach(life=life)
    world.settle()
    world.do(Move(fault))
    finish(world)


def test_bought_seconds_end_though_nobody_merges() -> None:
    world = _bought((2, 1), merge_every=1)
    for _ in range(4000):
        if world.state.phase is not Phase.RESERVED_TRAINING:
            break
        for move in world.moves():
            if move.kind != "merge" and move in world.moves():
                world.do(move)
        for life in list(world.lives.values()):
            life.merge = None
    assert world.state.phase is not Phase.RESERVED_TRAINING
    finish(world)


# --- long jobs ------------------------------------------------------------------------------------


def test_the_state_stays_small_over_a_long_job() -> None:
    """Workers come and go, drafters get better and worse: what is known does not pile up."""
    world = Classroom((1, 2), train="always", steps=80, prompts=1, group=2, checkpoint_every=1)
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
                world.crash(next(iter(world.lives.values())))
    assert world.school.merges > 15
    assert max(sizes[40:]) < 1.5 * max(sizes[10:40])


def test_numbers_that_are_none_are_not_taken_for_a_drafter() -> None:
    world = Classroom().open_school()
    world.teach()
    world.merge(quality=2.0)
    event = world.log[-1].event
    assert isinstance(event, DrafterMerged)
    for evaluation in (
        msgspec.structs.replace(event.evaluation, trained=float("nan")),
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


def test_off_is_off() -> None:
    world = World(small_spec(), [1, 1])
    finish(world)
    assert world.state.drafter.progress.sessions == 0


def _preempted(world: Classroom) -> DrafterTrainingStopped:
    known = world.state.workers[WorkerId("w0")]
    return DrafterTrainingStopped(
        job=world.state.job,
        worker=known.info.worker,
        incarnation=known.info.incarnation,
        training_session=known.training_session,
        seconds=0.0,
        dropped_seconds=0.0,
        typical_seconds=0.1,
    )


def _spoiled(world: Classroom, base: int) -> DrafterDiverged:
    known = world.state.workers[WorkerId("w0")]
    return DrafterDiverged(
        job=world.state.job,
        worker=known.info.worker,
        incarnation=known.info.incarnation,
        training_session=known.training_session,
        base=base,  # pyright: ignore[reportArgumentType]
        error="test",
    )
