"""The blobs that the state names stay in the run's folder; all others are discarded."""

from tlt.policies.run.run_state import RunState, Turn
from tlt.protocol.commands import DiscardBlobs
from tlt.protocol.refs import BlobRef, DrafterRef


def needed_blobs(state: RunState) -> set[BlobRef]:
    """Return the blobs that must stay; several references may name the same blob."""
    policy, adoption = state.policy, state.drafter.adoption
    refs = (
        adoption.used,
        adoption.previous,
        adoption.fallback,
        state.drafter.lineage.base,
    )
    found = {ref.weights for ref in refs if ref is not None}
    for version in (policy.current, policy.previous, policy.best):
        if version is not None:
            found |= {version.weights, version.adapter}
    if policy.checkpoint is not None:
        found |= set(policy.checkpoint.blobs)
    return {blob for blob in found if blob is not None}


def blobs_of_ended(state: RunState) -> set[BlobRef] | None:
    """Return the blobs that an ended job keeps, or None if it keeps all that it ever wrote."""
    keeps_all = state.spec.algorithm.keep_all or state.spec.drafter.keep_all
    return None if keeps_all else needed_blobs(state)


def discard(turn: Turn, *blobs: BlobRef | None) -> None:
    """Discard blobs of an older checkpoint or of a policy that is no longer the best."""
    if not turn.state.spec.algorithm.keep_all:
        _discard(turn, blobs)


def discard_drafters(turn: Turn, *drafters: DrafterRef | None) -> None:
    if not turn.state.spec.drafter.keep_all:
        _discard(turn, tuple(drafter.weights for drafter in drafters if drafter is not None))


def _discard(turn: Turn, blobs: tuple[BlobRef | None, ...]) -> None:
    kept = needed_blobs(turn.state)
    unused = tuple(b for b in dict.fromkeys(blobs) if b is not None and b not in kept)
    if unused:
        turn.emit(DiscardBlobs(job=turn.state.job, blobs=unused))
