"""Check invariants of drafter training after every decision, from records of its own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.simulation.drafter_training import Part, name_of
from tests.simulation.incarnation import WorkerIncarnation
from tlt.base.id_types import NAMED, Digest, DrafterVersion, Incarnation
from tlt.policies.drafter.training_evidence import MOST_EVALUATIONS
from tlt.policies.run.run_state import Duty, Phase, RunState
from tlt.protocol.commands import (
    AdoptDrafter,
    DiscardBlobs,
    MergeDrafter,
    ReleaseBlobs,
    RunCommand,
    StartRollout,
    StopDrafterTraining,
    TrainDrafter,
    UpdatePolicy,
)
from tlt.protocol.events import (
    DrafterDeltaReady,
    DrafterMerged,
    DrafterRefused,
    DrafterTrainingStopped,
    RunEvent,
)
from tlt.protocol.refs import DrafterBase, DrafterRef

if TYPE_CHECKING:
    from tests.simulation.checks import Checks
    from tests.simulation.world import World


class DrafterChecks:
    def __init__(self, world: "World", checks: "Checks") -> None:
        self._world = world
        self._checks = checks
        # by incarnation: its training session that hasn't stopped yet
        self.training: dict[Incarnation, int] = {}
        self.shape: Digest | None = None
        self.versions: list[DrafterVersion] = []
        # deltas that were announced, that are merged, and that can't be merged any more
        self.known: set[Part] = set()
        self.merged: set[Part] = set()
        self.discarded: set[Part] = set()
        # how often drafters were adopted and reverted
        self.adopted = 0
        self.reverted = 0
        # by drafter version: incarnations that couldn't load it
        self.refused: dict[DrafterVersion, set[Incarnation]] = {}

    def check_sessions(
        self, before: RunState, event: RunEvent, commands: Sequence[RunCommand]
    ) -> None:
        """Assert that workers have stopped training before they decode or update the policy."""
        if isinstance(event, DrafterTrainingStopped):
            session = self.training.pop(event.incarnation, event.training_session)
            if session != event.training_session:
                self.training[event.incarnation] = session
        for command in commands:
            if isinstance(command, StartRollout | UpdatePolicy):
                assert command.incarnation not in self.training, command
            elif isinstance(command, TrainDrafter):
                assert before.spec.drafter.train != "off"
                training_session = self.training.setdefault(
                    command.incarnation, command.training_session
                )
                assert training_session == command.training_session
            elif isinstance(command, StopDrafterTraining):
                assert self.training[command.incarnation] == command.training_session

    def check_drafter(
        self, before: RunState, event: RunEvent, after: RunState, commands: Sequence[RunCommand]
    ) -> None:
        self._check_lineage(before, event, after)
        if after.phase is Phase.ENDED and before.phase is not Phase.ENDED:
            # the card of the exported drafter shows these
            assert after.drafter.adoption.used == before.drafter.adoption.used
            assert after.drafter.adoption.live == before.drafter.adoption.live
        self._check_refused(before, event, after, commands)
        for command in commands:
            match command:
                case AdoptDrafter():
                    assert command.drafter == after.drafter.adoption.used
                    self._check_adopted(before, command.drafter)
                case MergeDrafter():
                    assert command.base == after.drafter.lineage.base
                    assert command.deltas == after.drafter.lineage.deltas
                    assert not self.versions or command.version > self.versions[-1]
                    self.versions.append(command.version)
                    assert self._checks.duties[command.incarnation] is Duty.DRAFTER_TRAINING
                case ReleaseBlobs() | DiscardBlobs():
                    self._checks.check_released(command)
                case _:
                    pass
        alive = {
            f"{known.info.incarnation}.{rank}"
            for known in after.workers.values()
            for rank in range(known.info.ranks)
        }
        assert after.drafter.lineage.newest_delta.keys() <= alive
        assert len(after.drafter.evidence.evaluations) <= MOST_EVALUATIONS

    def _check_refused(
        self, before: RunState, event: RunEvent, after: RunState, commands: Sequence[RunCommand]
    ) -> None:
        """Assert that workers without the drafter in use neither train nor evaluate."""
        used = after.drafter.adoption.version_in_use
        for command in commands:
            if isinstance(command, StartRollout) and command.drafter is not None:
                # the worker will try to load it again
                self.refused.get(command.drafter.version, set()).discard(command.incarnation)
        without = self.refused.get(used, set())
        alive = {known.info.incarnation for known in after.workers.values()}
        if used == NAMED and alive <= without:
            return
        trains = {
            known.info.incarnation
            for known in after.workers.values()
            if known.duty is Duty.DRAFTER_TRAINING
        }
        assert not trains & without
        for command in commands:
            if isinstance(command, TrainDrafter | MergeDrafter):
                assert command.incarnation not in without
        if isinstance(event, DrafterRefused) and event.version == used:
            known = before.workers.get(event.worker)
            if known is not None and known.info.incarnation == event.incarnation:
                # at least one worker loaded it
                assert alive - without

    def _check_adopted(self, before: RunState, drafter: DrafterRef | None) -> None:
        last = before.drafter.adoption.used
        if last is not None and (drafter is None or drafter.version < last.version):
            assert drafter in (before.drafter.adoption.fallback, before.drafter.adoption.previous)
            self.reverted += 1
            return
        assert drafter is not None
        self.shape = self.shape or drafter.architecture
        assert drafter.architecture == self.shape
        self.adopted += 1

    def _check_lineage(self, before: RunState, event: RunEvent, after: RunState) -> None:
        """Assert that a delta is merged at most once, and only into descendants of its base."""
        parts, contents = self._world.drafter_training.parts, self._world.drafter_training.contents
        old, new = before.drafter.lineage, after.drafter.lineage
        if before.phase is Phase.ENDED or after.phase is Phase.ENDED:
            return
        if isinstance(event, DrafterDeltaReady):
            self.known |= contents[name_of(event.delta)]
        if isinstance(event, DrafterMerged) and old.merge is not None and new.merge is None:
            fresh = {part for delta in old.merge.deltas for part in contents[name_of(delta)]}
            assert parts[event.base.version] == parts.get(old.base.version, frozenset()) | fresh
            assert not fresh & self.merged
            assert not fresh & self.discarded
            self.merged |= fresh
            assert not fresh & {part for d in new.deltas for part in contents[name_of(d)]}
        used = after.drafter.adoption.used
        if new.base.root != old.base.root:
            begun = frozenset[Part]() if used is None else parts[used.version]
            parts[new.base.root] = begun
            learned = 0 if used is None else self._world.drafter_training.learned[used.version]
            assert (new.base.updates, new.base.micro_batches) == (learned // 2, learned)
            self.discarded |= self.known - begun
            assert not new.deltas
        for delta in new.deltas:
            assert self._world.drafter_training.delta_bases[name_of(delta)] >= new.base.root

    def check_unreadable_base(self, incarnation: WorkerIncarnation, base: DrafterBase) -> None:
        """Assert that an unreadable base is out of date or was lost."""
        state, world = self._world.state, self._world
        assert base.weights is not None
        if self._checks.is_current(incarnation) and base == state.drafter.lineage.base:
            missed = world.drafter_blobs.is_missed(base.weights)
            assert world.blobs_were_lost or missed, f"{base} is gone"

    def check_unreadable_drafter(self, incarnation: WorkerIncarnation, drafter: DrafterRef) -> None:
        """Assert that an unreadable drafter is out of date or was lost before it was committed."""
        state, world = self._world.state, self._world
        if self._checks.is_current(incarnation) and drafter == state.drafter.adoption.used:
            missed = world.drafter_blobs.is_missed(drafter.weights)
            assert world.blobs_were_lost or missed, f"{drafter} is gone"

    def check_rebase(
        self, incarnation: WorkerIncarnation, rank: int, unmerged: set[int], base: DrafterBase
    ) -> None:
        """Assert that a member adds no work to a base that already holds it or discarded it."""
        if (
            not self._checks.is_current(incarnation)
            or base != self._world.state.drafter.lineage.base
        ):
            return
        own = {(int(incarnation.number), rank, number) for number in unmerged}
        assert not own & self._world.drafter_training.parts.get(base.version, frozenset())
        assert not own & self.discarded
