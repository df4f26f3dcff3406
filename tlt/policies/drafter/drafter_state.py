"""The part of a run's state that is about its drafter."""

import msgspec

from tlt.base.id_types import PromptIndex, Step
from tlt.policies.drafter.bases_and_deltas import Lineage
from tlt.policies.drafter.stopping_costs import StoppingCosts
from tlt.policies.drafter.training_evidence import TrainingEvidence
from tlt.policies.drafter.used_and_fallback_drafters import Adoption


class DrafterState(msgspec.Struct, frozen=True, kw_only=True):
    lineage: Lineage = Lineage()
    adoption: Adoption = Adoption()
    evidence: TrainingEvidence = TrainingEvidence()
    stopping: StoppingCosts = StoppingCosts()
    # number of training sessions begun, which is also the newest one's number
    sessions: int = 0
    # prompts of this step and the one before whose answers evaluate drafters
    held_out: dict[Step, tuple[PromptIndex, ...]] = {}
