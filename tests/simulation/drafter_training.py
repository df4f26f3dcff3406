"""What workers of the simulated world do for the drafter, as ranks and their worker really do it.

Deltas, trunks and drafters are blobs in flight, each with a name of its own; what a trunk was made
of is written down, so that the checks can tell whether anything went into it twice.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.incarnation import Pupil, WorkerIncarnation, blob
from tlt.ids import Digest, DrafterVersion, Member, PolicyVersion, PromptIndex, Step
from tlt.policies.drafter.data_selection import is_held_out
from tlt.policies.keyed_random import mix
from tlt.protocol.commands import MergeDrafter, StopDrafterTraining, TrainDrafter
from tlt.protocol.events import (
    DrafterCommitFailed,
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterRefused,
    DrafterTrainingStopped,
    RunEvent,
)
from tlt.protocol.records import DrafterEvaluation, TokensByOrigin
from tlt.protocol.refs import BlobRef, DrafterBase, DrafterDelta, DrafterRef

if TYPE_CHECKING:
    from tests.simulation.world import World

SHAPE = Digest("shape")
OTHER_SHAPE = Digest("other shape")
# of a micro-batch
_SECONDS = 0.1
# that a micro-batch reads
_ROWS = 1024
_BATCHES = 6
# the next drafter's accept length, as a multiple of what is in use
_BETTER, _SAME, _WORSE = 1.3, 0.97, 0.5

# what a rank learned between two deltas, and a delta: incarnation, rank, number
Part = tuple[int, int, int]


def name_of(delta: DrafterDelta) -> Part:
    return delta.incarnation, delta.rank, delta.number


@dataclass(eq=False)
class School:
    world: "World"
    # what is in a delta, and in a trunk, by its version
    contents: dict[Part, frozenset[Part]] = field(default_factory=dict)
    parts: dict[DrafterVersion, frozenset[Part]] = field(default_factory=dict)
    strengths: dict[DrafterVersion, float] = field(default_factory=dict)
    # blobs that an event which was delivered spoke of
    heard_of: set[Digest] = field(default_factory=set)
    # gone, and nobody was told
    vanished: set[Digest] = field(default_factory=set)
    # micro-batches in each trunk
    learned: dict[DrafterVersion, int] = field(default_factory=dict)
    # the trunk that each delta's member really stood on
    grew_on: dict[Part, DrafterVersion] = field(default_factory=dict)
    merges: int = 0
    # the run's folder takes no drafter any more
    disk_is_full: bool = False
    # by its version, what was not kept, and the coordinator does not know
    not_kept: dict[DrafterVersion, Digest] = field(default_factory=dict)
    # what all canaries come to, if not what chance gives
    quality: float | None = None

    # --- what can happen

    def moves(self, life: WorkerIncarnation) -> list[tuple[str, tuple[object, ...]]]:
        if life.training_session is None:
            return []
        if life.told_to_stop:
            if life.deaf:
                return [("overdue", (life,))]
            ranks = [i for i in range(life.ranks) if i not in life.dismissed]
            return [("dismiss", (life, i)) for i in ranks]
        found: list[tuple[str, tuple[object, ...]]] = []
        for index, pupil in enumerate(life.pupils):
            if index == 0 and life.merge is not None:
                found.append(("merge", (life,)))
            elif pupil.school is not None:
                found.append(("study" if pupil.opened < _BATCHES else "hand_in", (life, index)))
                if 0 < pupil.opened < _BATCHES:
                    found.append(("hand_in", (life, index)))
        return found

    def faults(self, life: WorkerIncarnation) -> list[tuple[str, tuple[object, ...]]]:
        if life.stopped or life.training_session is None:
            return []
        found: list[tuple[str, tuple[object, ...]]] = [("deafen", (life,))]
        found += [("spoil", (life, i)) for i, p in enumerate(life.pupils) if p.school is not None]
        if life.merge is not None:
            found += [("forget_merge", (life,)), ("merge_other", (life,))]
        return found

    def losses(self) -> list[tuple[str, tuple[object, ...]]]:
        """Blobs of drafters that could vanish, or that nothing could be written for."""
        there = self.heard_of & self.world.flight
        disk = "clear_disk" if self.disk_is_full else "fill_disk"
        return [(disk, ()), *(("vanish", (digest,)) for digest in sorted(there)[:4])]

    def fill_disk(self) -> None:
        self.disk_is_full = True

    def clear_disk(self) -> None:
        self.disk_is_full = False

    def vanish(self, digest: Digest) -> None:
        self.world.flight.discard(digest)
        self.vanished.add(digest)

    def deafen(self, life: WorkerIncarnation) -> None:
        """Its ranks hang in something that no command ends."""
        life.deaf = True

    def overdue(self, life: WorkerIncarnation) -> None:
        self.world.crash(life)

    def forget_merge(self, life: WorkerIncarnation) -> None:
        """Its ranks go on with something else."""
        life.merge = None

    # --- commands

    def train(self, life: WorkerIncarnation, command: TrainDrafter) -> None:
        assert not life.held, "it decodes"
        life.assignment = None
        if command.training_session <= life.over:
            return  # it has said that this one is over
        if (
            life.training_session is None
            or life.training_session.training_session != command.training_session
        ):
            life.dismissed.clear()
            life.told_to_stop = False
        if life.merge is not None and life.merge.base.version != command.base.version:
            life.merge = None  # it grew on what was given up
        life.training_session = command
        for index, pupil in enumerate(life.pupils):
            if index not in life.dismissed:
                pupil.school = command

    def preempt(self, life: WorkerIncarnation, command: StopDrafterTraining) -> None:
        if (
            life.training_session is not None
            and life.training_session.training_session == command.training_session
        ):
            life.told_to_stop, life.merge = True, None

    def ask(self, life: WorkerIncarnation, command: MergeDrafter) -> None:
        school = life.pupils[0].school
        if school is not None and school.training_session == command.training_session:
            life.merge = command

    def adopt(self, life: WorkerIncarnation, drafter: DrafterRef | None) -> None:
        if drafter is None or life.drafter == drafter:
            life.drafter = drafter
            return
        if self.is_readable(drafter.weights):
            life.drafter = drafter
            return
        self.world.checks.drafter_gone(life, drafter)
        self._say(
            life,
            DrafterRefused(
                job=self.world.state.job,
                worker=life.worker,
                incarnation=life.incarnation,
                error="gone",
                version=drafter.version,
            ),
        )

    def close(self, life: WorkerIncarnation) -> None:
        life.training_session = life.merge = None
        life.told_to_stop = False
        for pupil in life.pupils:
            pupil.school = None

    # --- a rank's work

    def study(self, life: WorkerIncarnation, rank: int) -> None:
        pupil = life.pupils[rank]
        school = pupil.school
        assert school is not None
        assert not life.held
        if not self._knows_something(life, school):
            self.dismiss(life, rank)
            return
        if school.base != pupil.base and not self._take(life, pupil, rank, school.base):
            return
        pupil.opened += 1 + mix(life.incarnation, rank, pupil.number, pupil.opened) % _BATCHES

    def _knows_something(self, life: WorkerIncarnation, school: TrainDrafter) -> bool:
        def is_lesson(step: int, prompt: int, member: int) -> bool:
            held_out = school.held_out.get(Step(step), ())
            place = Step(step), PromptIndex(prompt), Member(member)
            return step >= school.step - 1 and not is_held_out(held_out, *place)

        return any(is_lesson(*key) for key in life.overheard)

    def _take(self, life: WorkerIncarnation, pupil: Pupil, rank: int, base: DrafterBase) -> bool:
        if base.weights is not None and not self.is_readable(base.weights):
            self.world.checks.trunk_gone(life, base)
            self._spoil(life, rank)
            return False
        number, _ = base.merged.get(f"{life.incarnation}.{rank}", (-1, 0))
        if pupil.base is not None and pupil.base.root != base.root:
            pupil.unmerged, pupil.opened = set(), 0
            pupil.marks.clear()
        elif number in pupil.marks:
            pupil.unmerged -= pupil.marks[number]
            pupil.marks.clear()
        self.world.checks.rebased(life, rank, pupil.unmerged, base)
        pupil.base = base
        return True

    def hand_in(self, life: WorkerIncarnation, rank: int) -> None:
        pupil = life.pupils[rank]
        school, base = pupil.school, pupil.base
        assert school is not None
        assert base is not None
        pupil.unmerged.add(pupil.number)
        pupil.marks[pupil.number] = frozenset(pupil.unmerged)
        delta = DrafterDelta(
            worker=life.worker,
            incarnation=life.incarnation,
            rank=rank,
            number=pupil.number,
            base=base.version,
            blob=self._put(f"delta {life.incarnation}.{rank}.{pupil.number}"),
            micro_batches=_BATCHES * (len(pupil.unmerged) - 1) + pupil.opened,
            known=0,
        )
        self.grew_on[name_of(delta)] = base.version
        self.contents[name_of(delta)] = frozenset(
            (int(life.incarnation), rank, number) for number in pupil.unmerged
        )
        updates, seconds = pupil.opened, _SECONDS * pupil.opened
        pupil.number += 1
        pupil.opened = 0
        learned = DrafterDeltaReady(
            job=self.world.state.job,
            training_session=school.training_session,
            policy=PolicyVersion(life.version),
            delta=delta,
            updates=updates,
            tokens=TokensByOrigin(own=_ROWS * updates),
            seconds=seconds,
            reading_seconds=0.0,
            publishing_seconds=0.01,
            typical_seconds=_SECONDS,
            longest_seconds=_SECONDS,
            loss=1.0,
        )
        self._say(life, learned)

    def dismiss(self, life: WorkerIncarnation, rank: int) -> None:
        training_session, pupil = life.training_session, life.pupils[rank]
        assert training_session is not None
        if pupil.school is not None and pupil.opened and pupil.base is not None:
            self.hand_in(life, rank)
        pupil.school = None
        life.dismissed.add(rank)
        if len(life.dismissed) < life.ranks or life.gone:
            return
        life.training_session, life.told_to_stop, life.over = (
            None,
            False,
            training_session.training_session,
        )
        preempted = DrafterTrainingStopped(
            job=self.world.state.job,
            worker=life.worker,
            incarnation=life.incarnation,
            training_session=training_session.training_session,
            seconds=0.01,
            dropped_seconds=0.0,
            typical_seconds=_SECONDS,
        )
        self._say(life, preempted)

    def spoil(self, life: WorkerIncarnation, rank: int) -> None:
        """It diverged."""
        self._spoil(life, rank)

    def _spoil(self, life: WorkerIncarnation, rank: int) -> None:
        pupil = life.pupils[rank]
        school = pupil.school
        assert school is not None
        if rank == 0:
            life.merge = None
        pupil.school = pupil.base = None
        pupil.unmerged, pupil.opened = set(), 0
        pupil.marks.clear()
        spoiled = DrafterDiverged(
            job=self.world.state.job,
            worker=life.worker,
            incarnation=life.incarnation,
            training_session=school.training_session,
            base=school.base.version,
            error="test",
        )
        self._say(life, spoiled)

    def merge_other(self, life: WorkerIncarnation) -> None:
        """By a rank that could not load the drafter which the spec names."""
        self.merge(life, OTHER_SHAPE)

    def merge(self, life: WorkerIncarnation, shape: Digest = SHAPE) -> None:
        merge = life.merge
        assert merge is not None
        life.merge = None
        wanted = [delta.blob for delta in merge.deltas]
        if merge.base.weights is not None:
            wanted.append(merge.base.weights)
        if not all(map(self.is_readable, wanted)):
            self._spoil(life, 0)
            return
        self.merges += 1
        version = merge.version
        before = self.parts.get(merge.base.version, frozenset())
        self.parts[version] = before.union(*(self.contents[name_of(d)] for d in merge.deltas))
        used = None if life.drafter is None else self.strengths[life.drafter.version]
        strength = min(6.0, (used or 1.0) * self._quality(version))
        self.strengths[version] = strength
        micro_batches = merge.base.micro_batches + sum(
            delta.micro_batches for delta in merge.deltas
        )
        self.learned[version] = micro_batches
        newest = {f"{d.incarnation}.{d.rank}": (d.number, micro_batches) for d in merge.deltas}
        trained = DrafterMerged(
            job=self.world.state.job,
            worker=life.worker,
            incarnation=life.incarnation,
            base=DrafterBase(
                version=version,
                weights=self._put(f"trunk {version} {self.merges}"),
                root=merge.base.root,
                updates=micro_batches // 2,
                micro_batches=micro_batches,
                merged={**merge.base.merged, **newest},
            ),
            drafter=DrafterRef(
                version=version,
                weights=self._put(f"drafter {version} {self.merges}"),
                policy=PolicyVersion(life.version),
                architecture=shape,
                updates=micro_batches // 2,
                micro_batches=micro_batches,
            ),
            evaluation=DrafterEvaluation(used=used, trained=strength, answers=2),
            seconds=0.5,
        )
        self._say(life, trained)

    def _quality(self, version: DrafterVersion) -> float:
        if self.quality is not None:
            return self.quality
        kinds = (_BETTER,) * 4 + (_SAME,) * 3 + (_WORSE,)
        return kinds[mix(self.world.spec.seed, version) % len(kinds)]

    # --- blobs

    def _put(self, name: str) -> BlobRef:
        made = blob(name)
        self.world.flight.add(made.digest)
        return made

    def is_readable(self, ref: BlobRef) -> bool:
        return ref.digest in self.world.flight | self.world.committed

    def is_missed(self, ref: BlobRef) -> bool:
        """Nobody was told that it is gone, or nobody has heard of it yet."""
        return ref.digest in self.vanished or ref.digest in self.not_kept.values()

    def heard(self, event: RunEvent) -> None:
        match event:
            case DrafterDeltaReady():
                self.heard_of.add(event.delta.blob.digest)
            case DrafterMerged():
                assert event.base.weights is not None
                self.heard_of |= {event.base.weights.digest, event.drafter.weights.digest}
            case DrafterCommitFailed():
                self.not_kept.pop(event.version, None)
            case _:
                pass

    def kept(self, drafter: DrafterRef) -> None:
        there = self.is_readable(drafter.weights)
        assert there or drafter.weights.digest in self.vanished or self.world.blobs_were_lost
        if there and not self.disk_is_full:
            self.world.committed.add(drafter.weights.digest)
            return
        self.not_kept[drafter.version] = drafter.weights.digest
        lost = DrafterCommitFailed(job=self.world.state.job, version=drafter.version, error="test")
        self.world.post("coordinator", lost)

    def _say(self, life: WorkerIncarnation, event: RunEvent) -> None:
        if not self.world.say(life, event):
            life.gone = True
