"""The one drafter that all members train: what was added to it, and which of it engines guess with.

Members hand in deltas of the trunk they stand on; somebody merges them into the next trunk. A delta
is part of one trunk or of none, and what nobody needs any more is let go of.
"""

from collections.abc import Collection, Sequence

import msgspec

from tlt.messages import (
    AdoptDrafter,
    BlobRef,
    Canary,
    Decision,
    DeltaRef,
    DrafterNotKept,
    DrafterRef,
    DrafterRefused,
    DrafterTrained,
    ExplainDrafting,
    KeepDrafter,
    MergeDrafter,
    ReleaseBlobs,
    StrategyTally,
    TrunkRef,
)
from tlt.policies import drafting, pace, retention
from tlt.policies.heard import Heard, faded, fallen, heard, is_known
from tlt.policies.run_state import Duty, RunState, Turn, WorkerState
from tlt.policies.schooling import Merging, Schooling
from tlt.types import NAMED, DrafterVersion, Incarnation


def collect(turn: Turn, delta: DeltaRef) -> None:
    """It has in it what its member handed in before, on the same trunk.

    Once that is merged, the member goes on from there: what it handed in meanwhile comes again.
    """
    schooling = turn.state.schooling
    root = schooling.trunk.root
    if delta.trunk < max(root, schooling.joined.get(delta.member, root)):
        release(turn, (delta.blob,))
        return
    earlier = tuple(d.blob for d in schooling.deltas if d.member == delta.member)
    others = tuple(d for d in schooling.deltas if d.member != delta.member)
    change(turn, deltas=(*others, delta))
    release(turn, earlier)


def is_due(state: RunState) -> bool:
    """Whether there are micro-batches enough that are in no trunk yet."""
    waiting = sum(delta.lessons for delta in state.schooling.deltas)
    return waiting >= state.spec.drafter.merge_every


def ask_to_merge(turn: Turn, worker: WorkerState) -> None:
    state = turn.state
    schooling = state.schooling
    merging = Merging(
        worker=worker.info.worker,
        incarnation=worker.info.incarnation,
        version=_next_version(turn),
        deltas=schooling.deltas,
    )
    change(turn, merging=merging)
    turn.tell(
        MergeDrafter(
            worker=worker.info.worker,
            incarnation=worker.info.incarnation,
            job=state.job,
            step=state.step,
            lesson=worker.lesson,
            version=merging.version,
            trunk=schooling.trunk,
            deltas=merging.deltas,
        )
    )


def merge_no_more(turn: Turn, worker: WorkerState) -> None:
    merging = turn.state.schooling.merging
    if merging is not None and merging.incarnation == worker.info.incarnation:
        change(turn, merging=None)
        # its member may have handed in a newer one since
        release(turn, tuple(delta.blob for delta in merging.deltas))


def grow(turn: Turn, event: DrafterTrained) -> bool:
    """Whether it is the trunk that was asked for."""
    schooling, merging = turn.state.schooling, turn.state.schooling.merging
    made = tuple(blob for blob in (event.trunk.weights, event.drafter.weights) if blob is not None)
    asked = None if merging is None else (merging.incarnation, merging.version)
    if merging is None or asked != (event.incarnation, event.trunk.version):
        release(turn, made)  # it came late, or again
        return False
    members = {delta.member for delta in merging.deltas}
    unused = [delta.blob for delta in merging.deltas]
    unused += [delta.blob for delta in schooling.deltas if delta.member in members]
    if schooling.trunk.weights is not None:
        unused.append(schooling.trunk.weights)
    version = event.trunk.version
    joined = {m: version for m in members if m in schooling.handed_in}
    change(
        turn,
        merging=None,
        trunk=event.trunk,
        deltas=tuple(d for d in schooling.deltas if d.member not in members),
        joined={**schooling.joined, **joined},
    )
    _forget_the_dead(turn)
    release(turn, tuple(unused))
    _judge(turn, event)
    return True


def _forget_the_dead(turn: Turn) -> None:
    """Who has gone does not ask which of its deltas are in the trunk."""
    alive, trunk = turn.state.schooling.handed_in, turn.state.schooling.trunk
    merged = {member: number for member, number in trunk.merged.items() if member in alive}
    change(turn, trunk=msgspec.structs.replace(trunk, merged=merged))


# --- the drafter in use -------------------------------------------------------------------------


def _judge(turn: Turn, event: DrafterTrained) -> None:
    canary, used = event.canary, turn.state.schooling.used
    if used is not None and event.drafter.architecture != used.architecture:
        release(turn, (event.drafter.weights,))
        start_over(turn, "what was trained has another shape than what is used")
        return
    if not drafting.counts(canary):
        release(turn, (event.drafter.weights,))  # there was nothing to measure it by
        return
    noted = drafting.noted(turn.state.schooling, canary, event.trunk, turn.state.step)
    turn.set(schooling=noted)
    before = "none" if canary.used is None else f"{canary.used:.2f}"
    why = f"accept length {canary.trained:.2f} against {before} on {canary.answers} answers"
    told = drafting.Verdict(worth=True, saved=0.0, cost=0.0, why=why)
    if drafting.adopts(canary):
        explain(turn, "adopt", told)
        _adopt(turn, event.drafter, canary)
        return
    explain(turn, "reject", told)
    release(turn, (event.drafter.weights,))
    if drafting.spoiled(canary):
        start_over(turn, "what was trained has become worse than what is used")


def _adopt(turn: Turn, drafter: DrafterRef, canary: Canary) -> None:
    schooling = turn.state.schooling
    last, older, before = _in_use(turn)
    turn.tell(KeepDrafter(job=turn.state.job, drafter=drafter))
    if is_known(schooling.heard):
        change(turn, before=last, heard_before=_as_of_now(schooling, canary))
    if schooling.undrafted is None:
        change(turn, undrafted=pace.without(turn.state.spec, turn.state.spending))
    change(turn, used=drafter, last=last, heard={})
    if last is not None and last.weights != drafter.weights:
        release(turn, (last.weights,))
    retention.discard_drafters(turn, older, before)
    _tell_drafter(turn)


def _as_of_now(schooling: Schooling, canary: Canary) -> Heard:
    """What the drafter in use came to in rollouts, some of which earlier policies wrote."""
    used = schooling.version_in_use
    measured = [mark.trained for mark in schooling.marks if mark.version == used]
    then = measured[-1] if measured else schooling.began
    if then is None or canary.used is None:
        return schooling.heard
    return faded(schooling.heard, then, canary.used)


def _tell_drafter(turn: Turn) -> None:
    state = turn.state
    for worker in state.workers.values():
        if worker.duty is not Duty.LEAVING:
            turn.tell(
                AdoptDrafter(
                    worker=worker.info.worker,
                    incarnation=worker.info.incarnation,
                    job=state.job,
                    drafter=state.schooling.used,
                )
            )


def falls(turn: Turn, tallies: Sequence[StrategyTally]) -> bool:
    """Whether the drafter did much worse in rollouts than the one before, which is used again."""
    schooling = turn.state.schooling
    version = schooling.version_in_use
    now = heard(schooling.heard, tallies, version)
    if now != schooling.heard:
        change(turn, heard=now)
    turn.set(schooling=drafting.overheard(turn.state.schooling, tallies))
    lengths = fallen(now, schooling.heard_before)
    if lengths is None or schooling.used is None:
        return False
    live, before = lengths
    why = f"accept length {live:.2f} in rollouts, {before:.2f} with the one before"
    _return_to(turn, schooling.before, why)
    return True


def not_kept(turn: Turn, event: DrafterNotKept) -> bool:
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
    turn.set(schooling=drafting.rested(turn.state.schooling, turn.state.step))
    return True


def lacks(state: RunState, worker: WorkerState) -> bool:
    """Whether it has not got what others guess with. What nobody could load is named in vain."""
    schooling = state.schooling
    without = schooling.refused.get(schooling.version_in_use, ())
    if worker.info.incarnation not in without:
        return False
    return schooling.used is not None or not _is_everybody(state, without)


def _is_everybody(state: RunState, incarnations: Collection[Incarnation]) -> bool:
    return all(worker.info.incarnation in incarnations for worker in state.workers.values())


def refused(turn: Turn, event: DrafterRefused) -> bool:
    """Whether nobody has got what is in use, and what was before it is used again."""
    schooling, version = turn.state.schooling, event.version
    used = schooling.version_in_use
    if version is None or version not in (NAMED, used):
        return False  # it came late
    who = tuple(sorted({*schooling.refused.get(version, ()), event.incarnation}))
    change(turn, refused={**schooling.refused, version: who})
    if schooling.used is None or version != used or not _is_everybody(turn.state, who):
        return False
    _return_to(turn, schooling.last, event.error)
    turn.set(schooling=drafting.rested(turn.state.schooling, turn.state.step))
    return True


def tried_again(turn: Turn, worker: WorkerState) -> None:
    """It is about to load what is in use once more, and says so if it cannot."""
    used, refused = turn.state.schooling.used, turn.state.schooling.refused
    if used is not None and worker.info.incarnation in refused.get(used.version, ()):
        others = tuple(w for w in refused[used.version] if w != worker.info.incarnation)
        change(turn, refused={**refused, used.version: others})


def _return_to(turn: Turn, drafter: DrafterRef | None, why: str) -> None:
    used, last, before = _in_use(turn)
    change(turn, used=drafter, last=None, before=None, heard={}, heard_before={})
    turn.set(schooling=drafting.gone_back(turn.state.schooling, turn.state.step))
    _tell_drafter(turn)
    if used is not None:
        release(turn, (used.weights,))
    start_over(turn, why)
    # the trunk may have begun with it
    retention.discard_drafters(turn, used, last, before)


def _in_use(turn: Turn) -> tuple[DrafterRef | None, DrafterRef | None, DrafterRef | None]:
    schooling = turn.state.schooling
    return schooling.used, schooling.last, schooling.before


# --- other beginnings, and the end --------------------------------------------------------------


def start_over(turn: Turn, why: str) -> None:
    """From what is used; what members have in hand is of a trunk that is no more."""
    schooling = turn.state.schooling
    unused = [delta.blob for delta in (*schooling.deltas, *_merged_now(schooling))]
    if schooling.trunk.weights is not None:
        unused.append(schooling.trunk.weights)
    new_root(turn)
    release(turn, tuple(unused))
    told = drafting.Verdict(worth=True, saved=0.0, cost=0.0, why=why)
    explain(turn, "return", told)


def new_root(turn: Turn) -> None:
    schooling, version = turn.state.schooling, _next_version(turn)
    used, before = schooling.used, schooling.trunk
    updates, lessons = (0, 0) if used is None else (used.updates, used.lessons)
    trunk = TrunkRef(
        version=version,
        root=version,
        weights=None if used is None else used.weights,
        updates=before.updates if updates is None else updates,
        lessons=before.lessons if lessons is None else lessons,
    )
    change(turn, trunk=trunk, deltas=(), merging=None)


def end(turn: Turn) -> None:
    schooling = turn.state.schooling
    unused = [delta.blob for delta in (*schooling.deltas, *_merged_now(schooling))]
    if schooling.trunk.weights is not None:
        unused.append(schooling.trunk.weights)
    if schooling.used is not None:
        unused.append(schooling.used.weights)  # it was committed
    turn.set(
        schooling=Schooling(version=schooling.version, marks=schooling.marks, heard=schooling.heard)
    )
    release(turn, tuple(unused))
    change(turn, used=schooling.used)
    retention.discard_drafters(turn, schooling.last, schooling.before)


# ------------------------------------------------------------------------------------------------


def _merged_now(schooling: Schooling) -> tuple[DeltaRef, ...]:
    return () if schooling.merging is None else schooling.merging.deltas


def _next_version(turn: Turn) -> DrafterVersion:
    version = DrafterVersion(turn.state.schooling.version + 1)
    change(turn, version=version)
    return version


def change(turn: Turn, **changes: object) -> None:
    changed: Schooling = msgspec.structs.replace(turn.state.schooling, **changes)
    turn.set(schooling=changed)


def release(turn: Turn, blobs: tuple[BlobRef, ...]) -> None:
    """Equal bytes are one blob: what is used anywhere stays."""
    schooling = turn.state.schooling
    kept = {delta.blob for delta in (*schooling.deltas, *_merged_now(schooling))}
    if schooling.trunk.weights is not None:
        kept.add(schooling.trunk.weights)
    if schooling.used is not None:
        kept.add(schooling.used.weights)
    unused = tuple(blob for blob in dict.fromkeys(blobs) if blob not in kept)
    if unused:
        turn.tell(ReleaseBlobs(job=turn.state.job, blobs=unused))


def explain(turn: Turn, what: Decision, verdict: drafting.Verdict) -> None:
    turn.tell(
        ExplainDrafting(
            job=turn.state.job,
            what=what,
            # no more digits than any machine comes to
            saved=round(verdict.saved, 3),
            cost=round(verdict.cost, 3),
            why=verdict.why,
        )
    )
