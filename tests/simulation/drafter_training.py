"""Simulate drafter training as real ranks and workers do it.

Deltas, bases and drafters are blobs in flight with distinct names. The deltas in each base are
recorded, so that the checks find work that was merged twice.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.drafter_blobs import DrafterBlobs
from tests.simulation.incarnation import TrainingRank, WorkerIncarnation
from tlt.base.id_types import Digest, DrafterVersion, Member, PolicyVersion, PromptIndex, Step
from tlt.policies.drafter.data_selection import is_held_out
from tlt.policies.keyed_random import mix
from tlt.protocol.commands import MergeDrafter, StopDrafterTraining, TrainDrafter
from tlt.protocol.events import (
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterRefused,
    DrafterTrainingStopped,
    RunEvent,
)
from tlt.protocol.refs import DrafterBase, DrafterDelta, DrafterRef
from tlt.protocol.shared_values import DrafterEvaluation, TokensByOrigin

if TYPE_CHECKING:
    from tests.simulation.world import World

SHAPE = Digest("shape")
OTHER_SHAPE = Digest("other shape")
# tokens that a micro-batch reads
_ROWS = 1024
_BATCHES = 6
# accept length of the next drafter, relative to the drafter in use
_BETTER, _SAME, _WORSE = 1.3, 0.97, 0.5

# the work that a delta adds, named like the delta: incarnation, rank, number
Part = tuple[int, int, int]


def name_of(delta: DrafterDelta) -> Part:
    return delta.incarnation, delta.rank, delta.number


@dataclass(eq=False)
class DrafterTraining:
    world: "World"
    blobs: DrafterBlobs
    # the work in each delta, and in each base by its version
    contents: dict[Part, frozenset[Part]] = field(default_factory=dict)
    parts: dict[DrafterVersion, frozenset[Part]] = field(default_factory=dict)
    strengths: dict[DrafterVersion, float] = field(default_factory=dict)
    # micro-batches in each base
    learned: dict[DrafterVersion, int] = field(default_factory=dict)
    # the base that each delta's member trained from
    delta_bases: dict[Part, DrafterVersion] = field(default_factory=dict)
    merges: int = 0
    # the outcome of all evaluations; drawn at random if None
    quality: float | None = None
    # seconds of a micro-batch, and of a merge with its evaluation
    micro_batch_seconds: float = 0.1
    merge_seconds: float = 0.5

    # --- moves and faults

    def moves(self, incarnation: WorkerIncarnation) -> list[tuple[str, tuple[object, ...]]]:
        if incarnation.training_session is None:
            return []
        if incarnation.stopping:
            if incarnation.hangs:
                return [("replace_hanging", (incarnation,))]
            ranks = [i for i in range(incarnation.ranks) if i not in incarnation.stopped_ranks]
            return [("stop_rank", (incarnation, i)) for i in ranks]
        found: list[tuple[str, tuple[object, ...]]] = []
        for index, rank_state in enumerate(incarnation.training_ranks):
            if index == 0 and incarnation.merge is not None:
                found.append(("merge", (incarnation,)))
            elif rank_state.session is not None:
                found.append(
                    (
                        "train" if rank_state.opened < _BATCHES else "send_delta",
                        (incarnation, index),
                    )
                )
                if 0 < rank_state.opened < _BATCHES:
                    found.append(("send_delta", (incarnation, index)))
        return found

    def faults(self, incarnation: WorkerIncarnation) -> list[tuple[str, tuple[object, ...]]]:
        if incarnation.stopped or incarnation.training_session is None:
            return []
        found: list[tuple[str, tuple[object, ...]]] = [("hang", (incarnation,))]
        found += [
            ("diverge", (incarnation, i))
            for i, p in enumerate(incarnation.training_ranks)
            if p.session is not None
        ]
        if incarnation.merge is not None:
            found += [("forget_merge", (incarnation,)), ("merge_other", (incarnation,))]
        return found

    def hang(self, incarnation: WorkerIncarnation) -> None:
        """Let the ranks hang in a call that no command interrupts."""
        incarnation.hangs = True

    def replace_hanging(self, incarnation: WorkerIncarnation) -> None:
        self.world.workers.crash(incarnation)

    def forget_merge(self, incarnation: WorkerIncarnation) -> None:
        """Let the ranks continue training instead of merging."""
        incarnation.merge = None

    # --- commands

    def start_session(self, incarnation: WorkerIncarnation, command: TrainDrafter) -> None:
        assert not incarnation.held, "it decodes"
        incarnation.assignment = None
        if command.training_session <= incarnation.last_session:
            return  # it has reported the end of this session
        if (
            incarnation.training_session is None
            or incarnation.training_session.training_session != command.training_session
        ):
            incarnation.stopped_ranks.clear()
            incarnation.stopping = False
        if incarnation.merge is not None and incarnation.merge.base.version != command.base.version:
            incarnation.merge = None  # its base was abandoned
        incarnation.training_session = command
        for index, rank_state in enumerate(incarnation.training_ranks):
            if index not in incarnation.stopped_ranks:
                rank_state.session = command

    def stop_session(self, incarnation: WorkerIncarnation, command: StopDrafterTraining) -> None:
        if (
            incarnation.training_session is not None
            and incarnation.training_session.training_session == command.training_session
        ):
            incarnation.stopping, incarnation.merge = True, None

    def start_merge(self, incarnation: WorkerIncarnation, command: MergeDrafter) -> None:
        session = incarnation.training_ranks[0].session
        if session is not None and session.training_session == command.training_session:
            incarnation.merge = command

    def adopt(self, incarnation: WorkerIncarnation, drafter: DrafterRef | None) -> None:
        if drafter is None or incarnation.drafter == drafter:
            incarnation.drafter = drafter
            return
        if self.blobs.is_readable(drafter.weights):
            incarnation.drafter = drafter
            return
        self.world.checks.drafter.check_unreadable_drafter(incarnation, drafter)
        self._say(
            incarnation,
            DrafterRefused(
                job=self.world.state.job,
                worker=incarnation.worker,
                incarnation=incarnation.number,
                error="gone",
                version=drafter.version,
            ),
        )

    def close(self, incarnation: WorkerIncarnation) -> None:
        incarnation.training_session = incarnation.merge = None
        incarnation.stopping = False
        for rank_state in incarnation.training_ranks:
            rank_state.session = None

    # --- work of a rank

    def train(self, incarnation: WorkerIncarnation, rank: int) -> None:
        rank_state = incarnation.training_ranks[rank]
        session = rank_state.session
        assert session is not None
        assert not incarnation.held
        if not self._has_trainable_answer(incarnation, session):
            self.stop_rank(incarnation, rank)
            return
        if session.base != rank_state.base and not self._take(
            incarnation, rank_state, rank, session.base
        ):
            return
        rank_state.opened += (
            1 + mix(incarnation.number, rank, rank_state.number, rank_state.opened) % _BATCHES
        )

    def _has_trainable_answer(self, incarnation: WorkerIncarnation, session: TrainDrafter) -> bool:
        def is_trainable(step: int, prompt: int, member: int) -> bool:
            held_out = session.held_out.get(Step(step), ())
            answer = Step(step), PromptIndex(prompt), Member(member)
            return step >= session.step - 1 and not is_held_out(held_out, *answer)

        return any(is_trainable(*key) for key in incarnation.known_answers)

    def _take(
        self, incarnation: WorkerIncarnation, rank_state: TrainingRank, rank: int, base: DrafterBase
    ) -> bool:
        if base.weights is not None and not self.blobs.is_readable(base.weights):
            self.world.checks.drafter.check_unreadable_base(incarnation, base)
            self._diverge(incarnation, rank)
            return False
        number, _ = base.merged.get(f"{incarnation.number}.{rank}", (-1, 0))
        if rank_state.base is not None and rank_state.base.root != base.root:
            rank_state.unmerged, rank_state.opened = set(), 0
            rank_state.sent.clear()
        elif number in rank_state.sent:
            rank_state.unmerged -= rank_state.sent[number]
            rank_state.sent.clear()
        self.world.checks.drafter.check_rebase(incarnation, rank, rank_state.unmerged, base)
        rank_state.base = base
        return True

    def send_delta(self, incarnation: WorkerIncarnation, rank: int) -> None:
        rank_state = incarnation.training_ranks[rank]
        session, base = rank_state.session, rank_state.base
        assert session is not None
        assert base is not None
        rank_state.unmerged.add(rank_state.number)
        rank_state.sent[rank_state.number] = frozenset(rank_state.unmerged)
        delta = DrafterDelta(
            worker=incarnation.worker,
            incarnation=incarnation.number,
            rank=rank,
            number=rank_state.number,
            base=base.version,
            blob=self.blobs.put(f"delta {incarnation.number}.{rank}.{rank_state.number}"),
            micro_batches=_BATCHES * (len(rank_state.unmerged) - 1) + rank_state.opened,
            previous_micro_batches=0,
        )
        self.delta_bases[name_of(delta)] = base.version
        self.contents[name_of(delta)] = frozenset(
            (int(incarnation.number), rank, number) for number in rank_state.unmerged
        )
        updates = rank_state.opened
        rank_state.number += 1
        rank_state.opened = 0
        learned = DrafterDeltaReady(
            job=self.world.state.job,
            training_session=session.training_session,
            policy=PolicyVersion(incarnation.version),
            delta=delta,
            updates=updates,
            tokens=TokensByOrigin(own=_ROWS * updates),
            seconds=self.micro_batch_seconds * updates,
            reading_seconds=0.0,
            publishing_seconds=0.01,
            median_seconds=self.micro_batch_seconds,
            longest_seconds=self.micro_batch_seconds,
            loss=1.0,
        )
        self._say(incarnation, learned)

    def stop_rank(self, incarnation: WorkerIncarnation, rank: int) -> None:
        training_session, rank_state = (
            incarnation.training_session,
            incarnation.training_ranks[rank],
        )
        assert training_session is not None
        if rank_state.session is not None and rank_state.opened and rank_state.base is not None:
            self.send_delta(incarnation, rank)
        rank_state.session = None
        incarnation.stopped_ranks.add(rank)
        if len(incarnation.stopped_ranks) < incarnation.ranks or incarnation.gone:
            return
        incarnation.training_session, incarnation.stopping, incarnation.last_session = (
            None,
            False,
            training_session.training_session,
        )
        stopped = DrafterTrainingStopped(
            job=self.world.state.job,
            worker=incarnation.worker,
            incarnation=incarnation.number,
            training_session=training_session.training_session,
            seconds=0.01,
            dropped_seconds=0.0,
            median_seconds=self.micro_batch_seconds,
        )
        self._say(incarnation, stopped)

    def diverge(self, incarnation: WorkerIncarnation, rank: int) -> None:
        """Let the weights diverge."""
        self._diverge(incarnation, rank)

    def _diverge(self, incarnation: WorkerIncarnation, rank: int) -> None:
        rank_state = incarnation.training_ranks[rank]
        session = rank_state.session
        assert session is not None
        if rank == 0:
            incarnation.merge = None
        rank_state.session = rank_state.base = None
        rank_state.unmerged, rank_state.opened = set(), 0
        rank_state.sent.clear()
        diverged = DrafterDiverged(
            job=self.world.state.job,
            worker=incarnation.worker,
            incarnation=incarnation.number,
            training_session=session.training_session,
            base=session.base.version,
            error="test",
        )
        self._say(incarnation, diverged)

    def merge_other(self, incarnation: WorkerIncarnation) -> None:
        """Merge on a rank that couldn't load the drafter that the spec names."""
        self.merge(incarnation, OTHER_SHAPE)

    def merge(self, incarnation: WorkerIncarnation, shape: Digest = SHAPE) -> None:
        merge = incarnation.merge
        assert merge is not None
        incarnation.merge = None
        wanted = [delta.blob for delta in merge.deltas]
        if merge.base.weights is not None:
            wanted.append(merge.base.weights)
        if not all(map(self.blobs.is_readable, wanted)):
            self._diverge(incarnation, 0)
            return
        self.merges += 1
        version = merge.version
        before = self.parts.get(merge.base.version, frozenset())
        self.parts[version] = before.union(*(self.contents[name_of(d)] for d in merge.deltas))
        used = None if incarnation.drafter is None else self.strengths[incarnation.drafter.version]
        strength = min(6.0, (used or 1.0) * self._quality(version))
        self.strengths[version] = strength
        micro_batches = merge.base.micro_batches + sum(
            delta.micro_batches for delta in merge.deltas
        )
        self.learned[version] = micro_batches
        newest = {f"{d.incarnation}.{d.rank}": (d.number, micro_batches) for d in merge.deltas}
        trained = DrafterMerged(
            job=self.world.state.job,
            worker=incarnation.worker,
            incarnation=incarnation.number,
            base=DrafterBase(
                version=version,
                weights=self.blobs.put(f"training base {version} {self.merges}"),
                root=merge.base.root,
                updates=micro_batches // 2,
                micro_batches=micro_batches,
                merged={**merge.base.merged, **newest},
            ),
            drafter=DrafterRef(
                version=version,
                weights=self.blobs.put(f"drafter {version} {self.merges}"),
                policy=PolicyVersion(incarnation.version),
                architecture=shape,
                updates=micro_batches // 2,
                micro_batches=micro_batches,
            ),
            evaluation=DrafterEvaluation(
                accept_length_before=used, accept_length=strength, answers=2
            ),
            seconds=self.merge_seconds,
        )
        self._say(incarnation, trained)

    def _quality(self, version: DrafterVersion) -> float:
        if self.quality is not None:
            return self.quality
        kinds = (_BETTER,) * 4 + (_SAME,) * 3 + (_WORSE,)
        return kinds[mix(self.world.spec.seed, version) % len(kinds)]

    # --- blobs

    def _say(self, incarnation: WorkerIncarnation, event: RunEvent) -> None:
        if not self.world.workers.report(incarnation, event):
            incarnation.gone = True
