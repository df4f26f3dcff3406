"""Take part in drafter training: a rank that trains is a member and waits for no other member.

A member trains from the current base, publishes its work as deltas, and may have to merge deltas. A
command ends any of these at once. Beside it: the drafter that the engine proposes with, and what
drafters leave of shared memory.
"""

import time

from tlt.base.id_types import NAMED
from tlt.base.interrupt_check import CheckInterrupt, never_interrupt
from tlt.blobs.blob_files import Blobs
from tlt.engine.base import Engine
from tlt.errors import BlobError, ConfigError
from tlt.models.eagle_drafter import Drafter
from tlt.models.safetensors_io import read_weights
from tlt.protocol.commands import MergeDrafter, TrainDrafter
from tlt.protocol.events import (
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterTrainingStopped,
)
from tlt.protocol.refs import DrafterRef
from tlt.ranks.drafter.delta_publisher import DeltaPublisher
from tlt.ranks.drafter.drafter_factory import DrafterFactory
from tlt.ranks.drafter.evaluator import DrafterEvaluator
from tlt.ranks.drafter.merger import DrafterMerger
from tlt.ranks.drafter.replay_buffer import ReplayBuffer
from tlt.ranks.drafter.shared_hidden_states import HiddenStateStore
from tlt.ranks.drafter.trainer import DrafterTrainer
from tlt.ranks.rank_job_context import RankJob
from tlt.spec.config import HIDDEN_STATES

# time after which a member without answers to learn from leaves
_MOST_WAIT_SECONDS = 3.0
# policies in shared memory while one is published: the new, the present and the previous one
_POLICIES = 3
# room for tensors of rollouts, or the size of a policy if that is less
_ROLLOUT_BYTES = 256 << 20
# members' deltas, bases and drafters in use that are in shared memory at once, counted as bases
_DELTAS = 8

MemberEvent = DrafterDeltaReady | DrafterDiverged | DrafterMerged | DrafterTrainingStopped


class DrafterInUse:
    """The drafter that the engine proposes with now."""

    def __init__(self, engine: Engine, factory: DrafterFactory, blobs: Blobs) -> None:
        self.drafter: Drafter | None = factory.named
        self._engine = engine
        self._factory = factory
        self._blobs = blobs

    def adopt(self, ref: DrafterRef | None) -> str | None:
        """Use this version (None: the named drafter, or none); return the reason if that fails."""
        if ref is None:
            self._restore_named()
            return None
        if ref.version == self._engine.drafter_version:
            return None
        name = f"drafter version {ref.version}"
        if ref.architecture != self._factory.architecture:
            return f"{name} was made for another architecture"
        try:
            drafter = self._factory.build(read_weights(self._blobs, ref.weights))
            self._engine.adopt_drafter(ref.version, drafter)
        except (BlobError, ConfigError) as error:
            return f"{name}: {error}"
        self.drafter = drafter
        return None

    def _restore_named(self) -> None:
        named = self._factory.named
        if named is not None:
            self._engine.adopt_drafter(NAMED, named)
        elif self._engine.drafter_version is not None:
            self._engine.drop_drafter()
        self.drafter = named


class SharedMemoryBudget:
    """The sizes of a job's data in shared memory."""

    def __init__(self, engine: Engine, base_bytes: int) -> None:
        self._engine = engine
        self._loaded = engine.version
        self._base_bytes = base_bytes

    def beside_drafters(self) -> int:
        """Return the bytes for policies still to be published, and for rollouts."""
        one = self._engine.policy_bytes
        published = min(self._engine.version - self._loaded, _POLICIES - 1)
        return (_POLICIES - published) * one + min(one, _ROLLOUT_BYTES)

    def beside_states(self) -> int:
        """Return the bytes for policies, rollouts and drafters."""
        return self.beside_drafters() + _DELTAS * self._base_bytes


class DrafterMember:
    """The rank's training sessions."""

    def __init__(self, job: RankJob, engine: Engine, named: Drafter | None) -> None:
        """Train the drafter that the spec names (`named`), or a new one."""
        factory = DrafterFactory(job.spec, engine, named)
        budget = SharedMemoryBudget(engine, factory.base_bytes)
        blobs = job.blobs(budget.beside_drafters)
        states = HiddenStateStore(
            job.flight / HIDDEN_STATES, engine.token_state_example, budget.beside_states
        )
        ahead = job.spec.algorithm.staleness
        self.replay = ReplayBuffer(states, job.spec.drafter.megabytes << 20, ahead)
        self.in_use = DrafterInUse(engine, factory, blobs)
        self.publisher = DeltaPublisher(job, blobs, factory.base_bytes)
        self.trainer = DrafterTrainer(job, engine, factory, self.replay, self.publisher)
        # True if the last draw found no answers to learn from
        self.lacks_answers = False
        self._job = job
        self._engine = engine
        self._merger = DrafterMerger(job, factory, blobs)
        self._evaluator = DrafterEvaluator(factory.shared, engine.capabilities.shared_noise)
        self._session: TrainDrafter | None = None
        # the requested merge that is not finished yet
        self._pending_merge: MergeDrafter | None = None
        # the last training session that this rank has reported to be over
        self._last_over = 0
        # time of the last draw that found answers
        self._last_found = 0.0

    @property
    def is_training(self) -> bool:
        """Return True during a training session."""
        return self._session is not None

    def begin(self, command: TrainDrafter) -> None:
        """Begin a training session, or continue it from another base."""
        if command.training_session <= self._last_over:
            return
        if self._session is None:
            self._last_found = time.monotonic()
        self._session = command
        self.trainer.begin(command.base, command.members)
        if self._pending_merge is not None and not self._can_merge(self._pending_merge):
            self._pending_merge = None
        self.replay.begin(command.step)
        self.replay.hold_out(command.held_out)

    def request_merge(self, command: MergeDrafter) -> None:
        """Merge before the next micro-batch, unless the command is outdated."""
        if self._can_merge(command):
            self._pending_merge = command

    def step(self, check: CheckInterrupt) -> list[MemberEvent]:
        """Do one piece of work: a merge, a publication or a micro-batch.

        An exception of `check` ends it; an interrupted merge or publication starts again later.
        """
        session = self._session
        assert session is not None
        try:
            if self._pending_merge is not None:
                return [self._merge(session, self._pending_merge, check)]
            if self.publisher.is_due:
                return self._publish_late(session, check)
            return self._train(session, check)
        except (BlobError, ConfigError) as error:
            return [self._give_up(session, str(error))]

    def stop(self, training_session: int) -> list[MemberEvent]:
        """End a training session: publish if that is quick, and report the dropped work."""
        session, events = self._session, list[MemberEvent]()
        if session is not None and session.training_session == training_session:
            if self.publisher.updates and self.trainer.tracker and self.publisher.is_quick:
                try:
                    events.append(self._publish(session, never_interrupt))
                except BlobError as error:
                    events.append(self._give_up(session, str(error)))
            self._session = self._pending_merge = None
        self._last_over = max(self._last_over, training_session)
        stopped = DrafterTrainingStopped(
            **self._job.reporter,
            training_session=training_session,
            dropped_seconds=self.trainer.take_dropped_seconds(),
            median_seconds=self.trainer.median_seconds,
        )
        return [*events, stopped]

    def _train(self, session: TrainDrafter, check: CheckInterrupt) -> list[MemberEvent]:
        now = time.monotonic()
        answers = self.trainer.draw()
        self.lacks_answers = not answers
        if not answers:
            # answers of other workers may still arrive
            keeps_waiting = now - self._last_found <= _MOST_WAIT_SECONDS
            return [] if keeps_waiting else self.stop(session.training_session)
        self._last_found = now
        complaint = self.trainer.train(session.base, answers, check)
        if complaint is not None:
            return [self._give_up(session, complaint)]
        return [self._publish(session, check)] if self.publisher.is_due else []

    def _publish_late(self, session: TrainDrafter, check: CheckInterrupt) -> list[MemberEvent]:
        """Publish work whose publication was interrupted, before other work."""
        began = time.monotonic()
        check = self.publisher.limit_interrupts(check)
        try:
            self.trainer.move_to(session.base, check)
        except (BlobError, ConfigError):
            raise
        except Exception:
            self.publisher.count_interrupt(time.monotonic() - began)
            raise
        # the move drops work that can't be added to the new base
        return [self._publish(session, check)] if self.publisher.is_due else []

    def _publish(self, session: TrainDrafter, check: CheckInterrupt) -> DrafterDeltaReady:
        assert self.trainer.tracker is not None
        return self.publisher.publish(
            self.trainer.tracker,
            session.training_session,
            self._engine.version,
            self.trainer.median_seconds,
            check,
        )

    def _merge(
        self, session: TrainDrafter, command: MergeDrafter, check: CheckInterrupt
    ) -> DrafterMerged:
        began, trainer = time.monotonic(), self.trainer
        answers = self.replay.evaluation_answers()
        trainer.read(answers, check)
        if trainer.tracker is None and answers:
            trainer.move_to(session.base, check)
        root = None if trainer.tracker is None else trainer.tracker.root
        merged = self._merger.merge(command, root, check)
        evaluation = self._evaluator.evaluate(
            merged.drafter, self.in_use.drafter, answers, trainer.size.rows, check
        )
        event = self._merger.publish(merged, evaluation, self._engine.version, began, check)
        self._pending_merge = None
        return event

    def _can_merge(self, command: MergeDrafter) -> bool:
        """Return False if the command's session is over or its lineage given up."""
        session = self._session
        return (
            session is not None
            and session.training_session == command.training_session
            and session.base.version == command.base.version
        )

    def _give_up(self, session: TrainDrafter, error: str) -> DrafterDiverged:
        """End the training session, and drop a learner whose work no base can use."""
        self._session = self._pending_merge = None
        self.trainer.start_over()
        return DrafterDiverged(
            **self._job.reporter,
            training_session=session.training_session,
            base=session.base.version,
            error=error,
        )
