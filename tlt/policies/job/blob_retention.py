"""What a run's folder has to hold: whatever the state names. The rest is discarded."""

from tlt.policies.job.run_state import RunState, Turn
from tlt.protocol.commands import DiscardBlobs
from tlt.protocol.refs import BlobRef, DrafterRef


def needed(state: RunState) -> set[BlobRef]:
    """Equal bytes are one blob: it stays for as long as any of these names it."""
    drafter_state = state.drafter_state
    drafters = (drafter_state.used, drafter_state.last, drafter_state.before, drafter_state.base)
    refs = (state.policy, state.previous_policy, *drafters)
    found = {ref.weights for ref in refs if ref is not None}
    if state.best is not None:
        found.add(state.best.weights)
    if state.checkpoint is not None:
        found |= {state.checkpoint.weights, state.checkpoint.optimiser}
    return {blob for blob in found if blob is not None}


def discard(turn: Turn, *blobs: BlobRef | None) -> None:
    """Of a checkpoint, or of a policy that was the best."""
    if not turn.state.spec.algorithm.keep_all:
        _discard(turn, blobs)


def discard_drafters(turn: Turn, *drafters: DrafterRef | None) -> None:
    if not turn.state.spec.drafter.keep_all:
        _discard(turn, tuple(drafter.weights for drafter in drafters if drafter is not None))


def _discard(turn: Turn, blobs: tuple[BlobRef | None, ...]) -> None:
    kept = needed(turn.state)
    unused = tuple(b for b in dict.fromkeys(blobs) if b is not None and b not in kept)
    if unused:
        turn.tell(DiscardBlobs(job=turn.state.job, blobs=unused))
