"""Start a run from a checkpoint of another job, as if it had made that job's updates itself.

The number of the next step implies the seeds of sampling and the place in the learning rate's
schedule, so the version of the checkpoint stands for them. It implies the place in the order of
prompts, too, where no cursor says that dynamic sampling used more of them.
"""

from tlt.base.id_types import Step
from tlt.policies.drafter.bases_and_deltas import Lineage, begin_new_root
from tlt.policies.drafter.learning_curve import fit_curve
from tlt.policies.drafter.payoff_evidence import PayoffEvidence
from tlt.policies.drafter.used_and_fallback_drafters import Adoption
from tlt.policies.run.run_state import Turn
from tlt.protocol.refs import DrafterRef, StartingCheckpoint


def use(turn: Turn, start: StartingCheckpoint) -> None:
    saved = start.checkpoint
    turn.set(step=Step(saved.version), cursor=start.cursor)
    turn.set_policy(
        initial_version=saved.version,
        version=saved.version,
        target_version=saved.version,
        current=saved.policy,
        checkpoint=saved,
    )
    if start.drafter is not None:
        _use_drafter(turn, start.drafter, start.accept_length)


def _use_drafter(turn: Turn, drafter: DrafterRef, accept_length: float | None) -> None:
    """Propose with the drafter, and train it further under versions after its own."""
    lineage, _ = begin_new_root(Lineage(newest_version=drafter.version), drafter)
    evidence = PayoffEvidence()
    if accept_length is not None:
        curve = fit_curve(accept_length, ())
        evidence = PayoffEvidence(initial_length=accept_length, curve=curve)
    turn.set_drafter(lineage=lineage, adoption=Adoption(used=drafter), evidence=evidence)
