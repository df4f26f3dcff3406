"""The part of a run's state that is about its drafter."""

import msgspec

from tlt.policies.drafter.adoption import Adoption
from tlt.policies.drafter.lineage import Lineage
from tlt.policies.drafter.payoff_evidence import PayoffEvidence
from tlt.policies.drafter.training_progress import TrainingProgress


class DrafterState(msgspec.Struct, frozen=True, kw_only=True):
    # which versions exist
    lineage: Lineage = Lineage()
    # which one engines propose with
    adoption: Adoption = Adoption()
    # whether further training pays
    evidence: PayoffEvidence = PayoffEvidence()
    progress: TrainingProgress = TrainingProgress()
