"""Fail a job whose gradients stay infinite: its weights don't change any more."""

from tlt.policies.run import phase_transitions
from tlt.policies.run.run_state import Turn
from tlt.protocol.shared_values import UpdateMetrics

# policy updates in a row without an optimiser step
_MOST_SKIPPED = 5


def count_skipped(turn: Turn, metrics: UpdateMetrics | None) -> None:
    """Count an update that skipped all of its steps; a step resets the count."""
    if metrics is None or (metrics.optimiser_steps == 0 and metrics.skipped_steps == 0):
        return
    skipped = 0 if metrics.optimiser_steps else turn.state.policy.skipped_updates + 1
    turn.set_policy(skipped_updates=skipped)
    if skipped >= _MOST_SKIPPED:
        complaint = (
            f"the gradients of {skipped} policy updates in a row were not finite; "
            "the weights were left as they were"
        )
        phase_transitions.end_job(turn, "failed", complaint)
