"""A transition is what one journal entry changed: the ledger makes them, other folds read them."""

from collections.abc import Sequence

import msgspec

from tlt.policies.run.run_state import RunState
from tlt.protocol.commands import Command
from tlt.protocol.events import (
    AnyEvent,
    DecodingReported,
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterTrainingStopped,
    PolicyPublished,
    RolloutCut,
    RolloutFinished,
    WorkerIdled,
    WorkerJoined,
    WorkerLost,
)


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    before: RunState
    event: AnyEvent
    after: RunState
    commands: Sequence[Command]
    # when the coordinator consumed the event
    at: float

    @property
    def counts(self) -> bool:
        """Return False if the coordinator ignored the event, as one of an older incarnation."""
        before, after = self.before, self.after
        match self.event:
            case DecodingReported():
                return after.decoding is not before.decoding
            case RolloutFinished() | RolloutCut():
                names = ("batch", "ahead", "carried")
                return any(getattr(after, name) is not getattr(before, name) for name in names)
            case DrafterDeltaReady() | DrafterMerged() | DrafterDiverged():
                return after.drafter is not before.drafter
            case DrafterTrainingStopped() | WorkerIdled() | WorkerLost():
                return after.workers is not before.workers
            case WorkerJoined():
                return after.newest_incarnations is not before.newest_incarnations
            case PolicyPublished():
                return after.policy.version > before.policy.version
            case _:
                return True

    @property
    def enters_phase(self) -> bool:
        return self.after.phase is not self.before.phase
