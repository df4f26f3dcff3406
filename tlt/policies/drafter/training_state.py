"""What is known of one job's drafter: where its training stands, and what engines guess with."""

import msgspec

from tlt.ids import NAMED, DrafterVersion, Incarnation, PromptIndex, Step, WorkerId
from tlt.policies.drafter.learning_curve import Curve, Mark
from tlt.policies.drafter.live_acceptance import Heard
from tlt.protocol.refs import DrafterBase, DrafterDelta, DrafterRef


class Merging(msgspec.Struct, frozen=True, kw_only=True):
    """A member makes the next trunk of these."""

    worker: WorkerId
    incarnation: Incarnation
    version: DrafterVersion
    deltas: tuple[DrafterDelta, ...]
    # that the member handed in since it was asked
    since: int = 0


class DrafterTrainingState(msgspec.Struct, frozen=True, kw_only=True):
    # the number of the last lesson: a worker's stretch of training
    micro_batches: int = 0
    # of prompts of this step and of the one before: their answers measure drafters
    held_out: dict[Step, tuple[PromptIndex, ...]] = {}
    # the last version that somebody was asked to make
    version: DrafterVersion = DrafterVersion(0)
    base: DrafterBase = DrafterBase(
        version=DrafterVersion(0), root=DrafterVersion(0), weights=None, updates=0, micro_batches=0
    )
    # None: what the spec names
    used: DrafterRef | None = None
    # what was used until then: it is again, if this one cannot be kept
    last: DrafterRef | None = None
    # by version: who could not load it, and decodes without, or with an older one
    refused: dict[DrafterVersion, tuple[Incarnation, ...]] = {}
    # the last one before it that is known from rollouts, and what both came to there
    before: DrafterRef | None = None
    heard: Heard = {}
    heard_before: Heard = {}
    deltas: tuple[DrafterDelta, ...] = ()
    # by member that lives: the number of its newest delta, and the last trunk that has one of it
    handed_in: dict[str, int] = {}
    joined: dict[str, DrafterVersion] = {}
    merging: Merging | None = None
    # the last of them, and what they let expect; what the first began with
    marks: tuple[Mark, ...] = ()
    began: float | None = None
    expected: Curve | None = None
    # before there is any mark: what the drafter that the spec names comes to lately
    lately: Heard = {}
    # how many times as fast as plain decoding rollouts went before any drafter was adopted
    undrafted: float | None = None
    # the last step that had answers when a canary was measured
    measured: Step = Step(0)
    # of answers that may be learned from, in all steps
    tokens: int = 0
    # micro-batches of all members, what they read of them, and the seconds that they took
    updates: int = 0
    read: int = 0
    seconds: float = 0.0
    # of the micro-batches, those for which no seconds were bought
    idle_updates: int = 0
    # of the seconds that were bought, those of all members that are still to come
    bought: float = 0.0
    # how often training has not been worth it in a row, and the step before which nobody tries
    vain: int = 0
    rest_until: Step = Step(0)

    @property
    def version_in_use(self) -> DrafterVersion:
        return NAMED if self.used is None else self.used.version
