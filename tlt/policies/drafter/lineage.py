"""The one drafter that all members train: what was added to it, and which of it engines guess with.

Members hand in deltas of the trunk they stand on; somebody merges them into the next trunk. A delta
is part of one trunk or of none, and what nobody needs any more is let go of.
"""

from collections.abc import Collection, Sequence

import msgspec

from tlt.ids import NAMED, DrafterVersion, Incarnation
from tlt.policies.drafter import gate, speedup_model
from tlt.policies.drafter.live_acceptance import Heard, faded, fallen, heard, is_known
from tlt.policies.drafter.training_state import DrafterTrainingState, Merging
from tlt.policies.job import blob_retention
from tlt.policies.job.run_state import Duty, RunState, Turn, WorkerState
from tlt.protocol.commands import (
    AdoptDrafter,
    CommitDrafter,
    Decision,
    ExplainDrafterDecision,
    MergeDrafter,
    ReleaseBlobs,
)
from tlt.protocol.events import DrafterCommitFailed, DrafterMerged, DrafterRefused
from tlt.protocol.records import DrafterEvaluation, StrategyTally
from tlt.protocol.refs import BlobRef, DrafterBase, DrafterDelta, DrafterRef


def collect(turn: Turn, delta: DrafterDelta) -> None:
    """It has in it what its member handed in before, on the same trunk.

    Once that is merged, the member goes on from there: what it handed in meanwhile comes again.
    """
    drafter_state = turn.state.drafter_state
    root = drafter_state.base.root
    if delta.base < max(root, drafter_state.joined.get(delta.member, root)):
        release(turn, (delta.blob,))
        return
    earlier = tuple(d.blob for d in drafter_state.deltas if d.member == delta.member)
    others = tuple(d for d in drafter_state.deltas if d.member != delta.member)
    change(turn, deltas=(*others, delta))
    release(turn, earlier)


def is_due(state: RunState) -> bool:
    """Whether there are micro-batches enough that are in no trunk yet."""
    waiting = sum(delta.micro_batches for delta in state.drafter_state.deltas)
    return waiting >= state.spec.drafter.merge_every


def ask_to_merge(turn: Turn, worker: WorkerState) -> None:
    state = turn.state
    drafter_state = state.drafter_state
    merging = Merging(
        worker=worker.info.worker,
        incarnation=worker.info.incarnation,
        version=_next_version(turn),
        deltas=drafter_state.deltas,
    )
    change(turn, merging=merging)
    turn.tell(
        MergeDrafter(
            worker=worker.info.worker,
            incarnation=worker.info.incarnation,
            job=state.job,
            step=state.step,
            training_session=worker.training_session,
            version=merging.version,
            base=drafter_state.base,
            deltas=merging.deltas,
        )
    )


def merge_no_more(turn: Turn, worker: WorkerState) -> None:
    merging = turn.state.drafter_state.merging
    if merging is not None and merging.incarnation == worker.info.incarnation:
        change(turn, merging=None)
        # its member may have handed in a newer one since
        release(turn, tuple(delta.blob for delta in merging.deltas))


def grow(turn: Turn, event: DrafterMerged) -> bool:
    """Whether it is the trunk that was asked for."""
    drafter_state, merging = turn.state.drafter_state, turn.state.drafter_state.merging
    made = tuple(blob for blob in (event.base.weights, event.drafter.weights) if blob is not None)
    asked = None if merging is None else (merging.incarnation, merging.version)
    if merging is None or asked != (event.incarnation, event.base.version):
        release(turn, made)  # it came late, or again
        return False
    members = {delta.member for delta in merging.deltas}
    unused = [delta.blob for delta in merging.deltas]
    unused += [delta.blob for delta in drafter_state.deltas if delta.member in members]
    if drafter_state.base.weights is not None:
        unused.append(drafter_state.base.weights)
    version = event.base.version
    joined = {m: version for m in members if m in drafter_state.handed_in}
    change(
        turn,
        merging=None,
        base=event.base,
        deltas=tuple(d for d in drafter_state.deltas if d.member not in members),
        joined={**drafter_state.joined, **joined},
    )
    _forget_the_dead(turn)
    release(turn, tuple(unused))
    _judge(turn, event)
    return True


def _forget_the_dead(turn: Turn) -> None:
    """Who has gone does not ask which of its deltas are in the trunk."""
    alive, base = turn.state.drafter_state.handed_in, turn.state.drafter_state.base
    merged = {member: number for member, number in base.merged.items() if member in alive}
    change(turn, base=msgspec.structs.replace(base, merged=merged))


# --- the drafter in use -------------------------------------------------------------------------


def _judge(turn: Turn, event: DrafterMerged) -> None:
    evaluation, used = event.evaluation, turn.state.drafter_state.used
    if used is not None and event.drafter.architecture != used.architecture:
        release(turn, (event.drafter.weights,))
        start_over(turn, "what was trained has another shape than what is used")
        return
    if not gate.counts(evaluation):
        release(turn, (event.drafter.weights,))  # there was nothing to measure it by
        return
    noted = gate.noted(turn.state.drafter_state, evaluation, event.base, turn.state.step)
    turn.set(drafter_state=noted)
    before = "none" if evaluation.used is None else f"{evaluation.used:.2f}"
    why = f"accept length {evaluation.trained:.2f} against {before} on {evaluation.answers} answers"
    told = gate.Verdict(worth=True, saved=0.0, cost=0.0, why=why)
    if gate.adopts(evaluation):
        explain(turn, "adopt", told)
        _adopt(turn, event.drafter, evaluation)
        return
    explain(turn, "reject", told)
    release(turn, (event.drafter.weights,))
    if gate.spoiled(evaluation):
        start_over(turn, "what was trained has become worse than what is used")


def _adopt(turn: Turn, drafter: DrafterRef, evaluation: DrafterEvaluation) -> None:
    drafter_state = turn.state.drafter_state
    last, older, before = _in_use(turn)
    turn.tell(CommitDrafter(job=turn.state.job, drafter=drafter))
    if is_known(drafter_state.heard):
        change(turn, before=last, heard_before=_as_of_now(drafter_state, evaluation))
    if drafter_state.undrafted is None:
        change(turn, undrafted=speedup_model.without(turn.state.spec, turn.state.decode_costs))
    change(turn, used=drafter, last=last, heard={})
    if last is not None and last.weights != drafter.weights:
        release(turn, (last.weights,))
    blob_retention.discard_drafters(turn, older, before)
    _tell_drafter(turn)


def _as_of_now(drafter_state: DrafterTrainingState, evaluation: DrafterEvaluation) -> Heard:
    """What the drafter in use came to in rollouts, some of which earlier policies wrote."""
    used = drafter_state.version_in_use
    measured = [mark.trained for mark in drafter_state.marks if mark.version == used]
    then = measured[-1] if measured else drafter_state.began
    if then is None or evaluation.used is None:
        return drafter_state.heard
    return faded(drafter_state.heard, then, evaluation.used)


def _tell_drafter(turn: Turn) -> None:
    state = turn.state
    for worker in state.workers.values():
        if worker.duty is not Duty.LEAVING:
            turn.tell(
                AdoptDrafter(
                    worker=worker.info.worker,
                    incarnation=worker.info.incarnation,
                    job=state.job,
                    drafter=state.drafter_state.used,
                )
            )


def falls(turn: Turn, tallies: Sequence[StrategyTally]) -> bool:
    """Whether the drafter did much worse in rollouts than the one before, which is used again."""
    drafter_state = turn.state.drafter_state
    version = drafter_state.version_in_use
    now = heard(drafter_state.heard, tallies, version)
    if now != drafter_state.heard:
        change(turn, heard=now)
    turn.set(drafter_state=gate.overheard(turn.state.drafter_state, tallies))
    lengths = fallen(now, drafter_state.heard_before)
    if lengths is None or drafter_state.used is None:
        return False
    live, before = lengths
    why = f"accept length {live:.2f} in rollouts, {before:.2f} with the one before"
    _return_to(turn, drafter_state.before, why)
    return True


def not_kept(turn: Turn, event: DrafterCommitFailed) -> bool:
    """Whether it was in use. It lies in flight alone: nobody is to need it later."""
    used, last, before = _in_use(turn)
    if before is not None and before.version == event.version:
        change(turn, before=None, heard_before={})
    if last is not None and last.version == event.version:
        last = None
        change(turn, last=None)
    if used is None or used.version != event.version:
        return False
    _return_to(turn, last, f"version {event.version} could not be kept: {event.error}")
    turn.set(drafter_state=gate.rested(turn.state.drafter_state, turn.state.step))
    return True


def lacks(state: RunState, worker: WorkerState) -> bool:
    """Whether it has not got what others guess with. What nobody could load is named in vain."""
    drafter_state = state.drafter_state
    without = drafter_state.refused.get(drafter_state.version_in_use, ())
    if worker.info.incarnation not in without:
        return False
    return drafter_state.used is not None or not _is_everybody(state, without)


def _is_everybody(state: RunState, incarnations: Collection[Incarnation]) -> bool:
    return all(worker.info.incarnation in incarnations for worker in state.workers.values())


def refused(turn: Turn, event: DrafterRefused) -> bool:
    """Whether nobody has got what is in use, and what was before it is used again."""
    drafter_state, version = turn.state.drafter_state, event.version
    used = drafter_state.version_in_use
    if version is None or version not in (NAMED, used):
        return False  # it came late
    who = tuple(sorted({*drafter_state.refused.get(version, ()), event.incarnation}))
    change(turn, refused={**drafter_state.refused, version: who})
    if drafter_state.used is None or version != used or not _is_everybody(turn.state, who):
        return False
    _return_to(turn, drafter_state.last, event.error)
    turn.set(drafter_state=gate.rested(turn.state.drafter_state, turn.state.step))
    return True


def tried_again(turn: Turn, worker: WorkerState) -> None:
    """It is about to load what is in use once more, and says so if it cannot."""
    used, refused = turn.state.drafter_state.used, turn.state.drafter_state.refused
    if used is not None and worker.info.incarnation in refused.get(used.version, ()):
        others = tuple(w for w in refused[used.version] if w != worker.info.incarnation)
        change(turn, refused={**refused, used.version: others})


def _return_to(turn: Turn, drafter: DrafterRef | None, why: str) -> None:
    used, last, before = _in_use(turn)
    change(turn, used=drafter, last=None, before=None, heard={}, heard_before={})
    turn.set(drafter_state=gate.gone_back(turn.state.drafter_state, turn.state.step))
    _tell_drafter(turn)
    if used is not None:
        release(turn, (used.weights,))
    start_over(turn, why)
    # the trunk may have begun with it
    blob_retention.discard_drafters(turn, used, last, before)


def _in_use(turn: Turn) -> tuple[DrafterRef | None, DrafterRef | None, DrafterRef | None]:
    drafter_state = turn.state.drafter_state
    return drafter_state.used, drafter_state.last, drafter_state.before


# --- other beginnings, and the end --------------------------------------------------------------


def start_over(turn: Turn, why: str) -> None:
    """From what is used; what members have in hand is of a trunk that is no more."""
    drafter_state = turn.state.drafter_state
    unused = [delta.blob for delta in (*drafter_state.deltas, *_merged_now(drafter_state))]
    if drafter_state.base.weights is not None:
        unused.append(drafter_state.base.weights)
    new_root(turn)
    release(turn, tuple(unused))
    told = gate.Verdict(worth=True, saved=0.0, cost=0.0, why=why)
    explain(turn, "return", told)


def new_root(turn: Turn) -> None:
    drafter_state, version = turn.state.drafter_state, _next_version(turn)
    used, before = drafter_state.used, drafter_state.base
    updates, micro_batches = (0, 0) if used is None else (used.updates, used.micro_batches)
    base = DrafterBase(
        version=version,
        root=version,
        weights=None if used is None else used.weights,
        updates=before.updates if updates is None else updates,
        micro_batches=before.micro_batches if micro_batches is None else micro_batches,
    )
    change(turn, base=base, deltas=(), merging=None)


def end(turn: Turn) -> None:
    drafter_state = turn.state.drafter_state
    unused = [delta.blob for delta in (*drafter_state.deltas, *_merged_now(drafter_state))]
    if drafter_state.base.weights is not None:
        unused.append(drafter_state.base.weights)
    if drafter_state.used is not None:
        unused.append(drafter_state.used.weights)  # it was committed
    turn.set(
        drafter_state=DrafterTrainingState(
            version=drafter_state.version, marks=drafter_state.marks, heard=drafter_state.heard
        )
    )
    release(turn, tuple(unused))
    change(turn, used=drafter_state.used)
    blob_retention.discard_drafters(turn, drafter_state.last, drafter_state.before)


# ------------------------------------------------------------------------------------------------


def _merged_now(drafter_state: DrafterTrainingState) -> tuple[DrafterDelta, ...]:
    return () if drafter_state.merging is None else drafter_state.merging.deltas


def _next_version(turn: Turn) -> DrafterVersion:
    version = DrafterVersion(turn.state.drafter_state.version + 1)
    change(turn, version=version)
    return version


def change(turn: Turn, **changes: object) -> None:
    changed: DrafterTrainingState = msgspec.structs.replace(turn.state.drafter_state, **changes)
    turn.set(drafter_state=changed)


def release(turn: Turn, blobs: tuple[BlobRef, ...]) -> None:
    """Equal bytes are one blob: what is used anywhere stays."""
    drafter_state = turn.state.drafter_state
    kept = {delta.blob for delta in (*drafter_state.deltas, *_merged_now(drafter_state))}
    if drafter_state.base.weights is not None:
        kept.add(drafter_state.base.weights)
    if drafter_state.used is not None:
        kept.add(drafter_state.used.weights)
    unused = tuple(blob for blob in dict.fromkeys(blobs) if blob not in kept)
    if unused:
        turn.tell(ReleaseBlobs(job=turn.state.job, blobs=unused))


def explain(turn: Turn, what: Decision, verdict: gate.Verdict) -> None:
    turn.tell(
        ExplainDrafterDecision(
            job=turn.state.job,
            what=what,
            # no more digits than any machine comes to
            saved=round(verdict.saved, 3),
            cost=round(verdict.cost, 3),
            why=verdict.why,
        )
    )
