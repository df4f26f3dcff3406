"""The part of a run's state that is about its drafter."""

import msgspec

from tlt.policies.drafter.bases_and_deltas import Lineage
from tlt.policies.drafter.payoff_evidence import PayoffEvidence
from tlt.policies.drafter.training_totals import TrainingProgress
from tlt.policies.drafter.used_and_fallback_drafters import Adoption


class DrafterState(msgspec.Struct, frozen=True, kw_only=True):
    lineage: Lineage = Lineage()
    adoption: Adoption = Adoption()
    evidence: PayoffEvidence = PayoffEvidence()
    progress: TrainingProgress = TrainingProgress()
