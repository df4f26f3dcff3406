"""The loop inside the loop: idle workers train the drafter, and stop the moment they are needed.

A worker that trains has duty DRAFT. It leaves that duty only by saying so (`DrafterPreempted`), or
by being lost; so nobody trains and decodes, or learns, at once. A delta, once heard of, is part of
exactly one trunk or of none.
"""

import msgspec

from tlt.messages import (
    AdoptDrafter,
    BlobRef,
    DeltaRef,
    DrafterLearned,
    DrafterPreempted,
    DrafterRef,
    DrafterSpoiled,
    DrafterTrained,
    ExplainDrafting,
    KeepDrafter,
    MergeDrafter,
    PreemptDrafter,
    ReleaseBlobs,
    TrainDrafter,
    TrunkRef,
)
from tlt.policies import drafting
from tlt.policies.run_state import Draft, Duty, Phase, RunState, WorkerState
from tlt.policies.schooling import Merging, Schooling
from tlt.types import DrafterVersion, WorkerId

_TRAINS = (Duty.DRAFT, Duty.PREEMPTING)
# deltas of each rank of a member that was asked to merge, before it is not expected to any more
_PATIENCE = 16


def is_trained(state: RunState) -> bool:
    """Whether some worker trains, or has not said yet that it has stopped."""
    return any(worker.duty in _TRAINS for worker in state.workers.values())


def _is_wanted(state: RunState) -> bool:
    """Nobody asks a drafter once speculation was given up."""
    return state.spec.drafter.train != "off" and state.speculates


def is_merging(state: RunState, worker: WorkerId) -> bool:
    merging = state.schooling.merging
    return merging is not None and merging.worker == worker


# --- a worker's lesson --------------------------------------------------------------------------


def begin_if_worth(draft: Draft, worker: WorkerId) -> None:
    """An idle worker trains, or stays idle."""
    state = draft.state
    if not _is_wanted(state):
        return
    verdict = drafting.worth_training(state.spec, state.schooling, _ahead(draft), state.step)
    if not is_trained(state):
        _explain(draft, "train" if verdict.worth else "rest", verdict)
    if verdict.worth:
        _begin(draft, worker)


def look_again(draft: Draft) -> None:
    """There is another answer to learn from: who is idle for want of one may begin."""
    state = draft.state
    if not _is_wanted(state) or state.phase not in (Phase.ROLLING, Phase.EVALUATING):
        return
    idle = [worker for worker, known in state.workers.items() if known.duty is Duty.IDLE]
    if not idle:
        return
    if drafting.worth_training(state.spec, state.schooling, _ahead(draft), state.step).worth:
        for worker in idle:
            _begin(draft, worker)


def _begin(draft: Draft, worker: WorkerId) -> None:
    schooling = draft.state.schooling
    lesson = schooling.lessons + 1
    draft.set(schooling=msgspec.structs.replace(schooling, lessons=lesson))
    draft.assign(worker, Duty.DRAFT, lesson=lesson)
    _tell_trunk(draft, draft.state.workers[worker])


def _tell_trunk(draft: Draft, worker: WorkerState) -> None:
    state = draft.state
    draft.tell(
        TrainDrafter(
            worker=worker.info.worker,
            incarnation=worker.info.incarnation,
            job=state.job,
            step=state.step,
            lesson=worker.lesson,
            trunk=state.schooling.trunk,
            policy=state.policy,
        )
    )


def preempt(draft: Draft, worker: WorkerId) -> None:
    current = draft.state.workers[worker]
    if current.duty is not Duty.DRAFT:
        return
    draft.assign(worker, Duty.PREEMPTING)
    draft.tell(
        PreemptDrafter(
            worker=worker,
            incarnation=current.info.incarnation,
            job=draft.state.job,
            lesson=current.lesson,
        )
    )


def preempt_all(draft: Draft) -> None:
    for worker in draft.state.workers:
        preempt(draft, worker)


def preempted(draft: Draft, event: DrafterPreempted) -> bool:
    """Whether it is news."""
    worker = draft.state.workers.get(event.worker)
    if worker is None or worker.info.incarnation != event.incarnation:
        return False
    if worker.duty not in _TRAINS or worker.lesson != event.lesson:
        return False
    draft.assign(event.worker, Duty.IDLE)
    _merge_no_more(draft, worker)
    return True


def lost(draft: Draft, worker: WorkerState) -> None:
    """Nothing more is heard of its ranks; what they handed in is not lost."""
    _merge_no_more(draft, worker)
    schooling, info = draft.state.schooling, worker.info
    members = {f"{info.incarnation}.{rank}" for rank in range(info.ranks)}
    if members.isdisjoint(schooling.heard):
        return
    _change(
        draft,
        heard={m: number for m, number in schooling.heard.items() if m not in members},
        joined={m: version for m, version in schooling.joined.items() if m not in members},
    )


def _merge_no_more(draft: Draft, worker: WorkerState) -> None:
    merging = draft.state.schooling.merging
    if merging is not None and merging.incarnation == worker.info.incarnation:
        _change(draft, merging=None)
        # its member may have handed in a newer one since
        _release(draft, tuple(delta.blob for delta in merging.deltas))


# --- what members say ---------------------------------------------------------------------------


def learned(draft: Draft, event: DrafterLearned) -> None:
    state, delta = draft.state, event.delta
    schooling = state.schooling
    worker = state.workers.get(delta.worker)
    if worker is None or worker.info.incarnation != delta.incarnation:
        return
    if delta.number <= schooling.heard.get(delta.member, -1):
        _release(draft, (delta.blob,))  # it came late, or again
        return
    _change(
        draft,
        heard={**schooling.heard, delta.member: delta.number},
        updates=schooling.updates + event.updates,
        seconds=schooling.seconds + event.seconds + event.reading_seconds,
        bought=max(0.0, schooling.bought - event.seconds - event.reading_seconds),
    )
    _collect(draft, delta)
    if worker.duty is Duty.DRAFT:
        _merge_if_due(draft, worker)


def _collect(draft: Draft, delta: DeltaRef) -> None:
    """It has in it what its member handed in before, on the same trunk.

    Once that is merged, the member goes on from there: what it handed in meanwhile comes again.
    """
    schooling = draft.state.schooling
    root = schooling.trunk.root
    if delta.trunk < max(root, schooling.joined.get(delta.member, root)):
        _release(draft, (delta.blob,))
        return
    earlier = tuple(d.blob for d in schooling.deltas if d.member == delta.member)
    others = tuple(d for d in schooling.deltas if d.member != delta.member)
    _change(draft, deltas=(*others, delta))
    _release(draft, earlier)


def _merge_if_due(draft: Draft, worker: WorkerState) -> None:
    state = draft.state
    schooling = state.schooling
    if schooling.merging is not None:
        _wait(draft, schooling.merging, worker)
        return
    waiting = sum(delta.lessons for delta in schooling.deltas)
    last = state.phase is Phase.DRAFTING and schooling.bought <= 0.0
    if last and waiting == 0:
        preempt_all(draft)
        return
    if waiting < state.spec.drafter.merge_every and not last:
        return
    merging = Merging(
        worker=worker.info.worker,
        incarnation=worker.info.incarnation,
        version=_next_version(draft),
        deltas=schooling.deltas,
    )
    _change(draft, merging=merging)
    draft.tell(
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


def _wait(draft: Draft, merging: Merging, worker: WorkerState) -> None:
    """Whoever goes on learning instead has not got what it was asked, or not listened."""
    if worker.info.incarnation != merging.incarnation:
        return
    since = merging.since + 1
    _change(draft, merging=msgspec.structs.replace(merging, since=since))
    if since >= _PATIENCE * worker.info.ranks:
        preempt(draft, merging.worker)


def trained(draft: Draft, event: DrafterTrained) -> None:
    state = draft.state
    schooling, merging = state.schooling, state.schooling.merging
    worker = state.workers.get(event.worker)
    if worker is None or worker.info.incarnation != event.incarnation:
        return
    made = tuple(blob for blob in (event.trunk.weights, event.drafter.weights) if blob is not None)
    asked = None if merging is None else (merging.incarnation, merging.version)
    if merging is None or asked != (event.incarnation, event.trunk.version):
        _release(draft, made)  # it came late, or again
        return
    members = {delta.member for delta in merging.deltas}
    unused = [delta.blob for delta in merging.deltas]
    unused += [delta.blob for delta in schooling.deltas if delta.member in members]
    if schooling.trunk.weights is not None:
        unused.append(schooling.trunk.weights)
    version = event.trunk.version
    joined = {m: version for m in members if m in schooling.heard}
    _change(
        draft,
        merging=None,
        trunk=event.trunk,
        deltas=tuple(d for d in schooling.deltas if d.member not in members),
        joined={**schooling.joined, **joined},
    )
    _forget_the_dead(draft)
    _release(draft, tuple(unused))
    _judge(draft, event)
    _go_on(draft)


def _forget_the_dead(draft: Draft) -> None:
    """Who has gone does not ask which of its deltas are in the trunk."""
    alive, trunk = draft.state.schooling.heard, draft.state.schooling.trunk
    merged = {member: number for member, number in trunk.merged.items() if member in alive}
    _change(draft, trunk=msgspec.structs.replace(trunk, merged=merged))


def _judge(draft: Draft, event: DrafterTrained) -> None:
    canary, used = event.canary, draft.state.schooling.used
    if used is not None and event.drafter.architecture != used.architecture:
        _release(draft, (event.drafter.weights,))
        _start_over(draft, "what was trained has another shape than what is used")
        return
    if not drafting.counts(canary):
        _release(draft, (event.drafter.weights,))  # there was nothing to measure it by
        return
    noted = drafting.noted(draft.state.schooling, canary, event.trunk, draft.state.step)
    draft.set(schooling=noted)
    before = "none" if canary.used is None else f"{canary.used:.2f}"
    why = f"accept length {canary.trained:.2f} against {before} on {canary.answers} answers"
    told = drafting.Verdict(worth=True, saved=0.0, cost=0.0, why=why)
    if drafting.adopts(canary):
        _explain(draft, "adopt", told)
        _adopt(draft, event.drafter)
        return
    _explain(draft, "reject", told)
    _release(draft, (event.drafter.weights,))
    if drafting.spoiled(canary):
        _start_over(draft, "what was trained has become worse than what is used")


def _adopt(draft: Draft, drafter: DrafterRef) -> None:
    state = draft.state
    last = state.schooling.used
    draft.tell(KeepDrafter(job=state.job, drafter=drafter))
    _change(draft, used=drafter)
    if last is not None and last.weights != drafter.weights:
        _release(draft, (last.weights,))
    for worker in state.workers.values():
        if worker.duty is not Duty.LEAVING:
            draft.tell(
                AdoptDrafter(
                    worker=worker.info.worker,
                    incarnation=worker.info.incarnation,
                    job=state.job,
                    drafter=drafter,
                )
            )


def _go_on(draft: Draft) -> None:
    """With the new trunk, if it is still worth it."""
    state = draft.state
    members = [w for w in state.workers.values() if w.duty is Duty.DRAFT]
    ahead = _ahead(draft)
    if state.phase is Phase.DRAFTING:
        still = drafting.purchase(state.spec, state.schooling, ahead, state.step)
        worth = state.schooling.bought > 0.0 and still.worth
    else:
        verdict = drafting.worth_training(state.spec, state.schooling, ahead, state.step)
        worth = verdict.worth
        if not worth and members:
            _explain(draft, "rest", verdict)
    for worker in members:
        if worth and state.speculates:
            _tell_trunk(draft, worker)
        else:
            preempt(draft, worker.info.worker)


def spoiled(draft: Draft, event: DrafterSpoiled) -> None:
    worker = draft.state.workers.get(event.worker)
    if worker is None or worker.info.incarnation != event.incarnation:
        return
    if worker.duty not in _TRAINS or worker.lesson != event.lesson:
        return
    if event.trunk != draft.state.schooling.trunk.version:
        preempt(draft, event.worker)  # what it could not read, or spoiled, was replaced since
        return
    draft.set(schooling=drafting.in_vain(draft.state.schooling, draft.state.step))
    _start_over(draft, event.error)
    preempt_all(draft)


def _start_over(draft: Draft, why: str) -> None:
    """From what is used; what members have in hand is of a trunk that is no more."""
    schooling = draft.state.schooling
    unused = [delta.blob for delta in (*schooling.deltas, *_merged_now(schooling))]
    if schooling.trunk.weights is not None:
        unused.append(schooling.trunk.weights)
    _new_root(draft)
    _release(draft, tuple(unused))
    told = drafting.Verdict(worth=True, saved=0.0, cost=0.0, why=why)
    _explain(draft, "return", told)


def blobs_lost(draft: Draft) -> None:
    """What was in flight is gone; the drafter that is used was committed."""
    _new_root(draft)
    for worker in draft.state.workers.values():
        if worker.duty is Duty.DRAFT:
            _tell_trunk(draft, worker)


def _new_root(draft: Draft) -> None:
    schooling, version = draft.state.schooling, _next_version(draft)
    used = schooling.used
    trunk = TrunkRef(
        version=version,
        root=version,
        weights=None if used is None else used.weights,
        updates=0 if used is None else schooling.trunk.updates,
        lessons=0 if used is None else schooling.trunk.lessons,
    )
    _change(draft, trunk=trunk, deltas=(), merging=None)


def end(draft: Draft) -> None:
    schooling = draft.state.schooling
    unused = [delta.blob for delta in (*schooling.deltas, *_merged_now(schooling))]
    if schooling.trunk.weights is not None:
        unused.append(schooling.trunk.weights)
    if schooling.used is not None:
        unused.append(schooling.used.weights)  # it was committed
    draft.set(schooling=Schooling(version=schooling.version, marks=schooling.marks))
    _release(draft, tuple(unused))
    _change(draft, used=schooling.used)


# --- seconds that are bought --------------------------------------------------------------------


def buy(draft: Draft) -> bool:
    """After a round, all workers may train for a while before they learn."""
    state = draft.state
    if not _is_wanted(state) or not state.workers:
        return False
    verdict = drafting.purchase(state.spec, state.schooling, _ahead(draft), state.step)
    members = [
        worker
        for worker, known in state.workers.items()
        if known.duty in (Duty.IDLE, Duty.ROLLOUT, Duty.DRAFT)
    ]
    if not verdict.worth or not members:
        return False
    _explain(draft, "buy", verdict)
    ranks = sum(state.workers[worker].info.ranks for worker in members)
    _change(draft, bought=verdict.cost * ranks)
    for worker in members:
        if state.workers[worker].duty is not Duty.DRAFT:
            _begin(draft, worker)
    return True


# ------------------------------------------------------------------------------------------------


def _ahead(draft: Draft) -> drafting.Outlook:
    state = draft.state
    members = sum(worker.info.ranks for worker in state.workers.values())
    # the first round has taken so long at least
    so_far = 0.0 if state.round is None else draft.now - state.round_began
    opened = state.phase is not Phase.EVALUATING
    steps = state.spec.algorithm.steps - state.step - opened
    return drafting.outlook(state.spec, steps, state.rolled_seconds or so_far, members)


def _merged_now(schooling: Schooling) -> tuple[DeltaRef, ...]:
    return () if schooling.merging is None else schooling.merging.deltas


def _next_version(draft: Draft) -> DrafterVersion:
    version = DrafterVersion(draft.state.schooling.version + 1)
    _change(draft, version=version)
    return version


def _change(draft: Draft, **changes: object) -> None:
    changed: Schooling = msgspec.structs.replace(draft.state.schooling, **changes)
    draft.set(schooling=changed)


def _release(draft: Draft, blobs: tuple[BlobRef, ...]) -> None:
    """Equal bytes are one blob: what is used anywhere stays."""
    schooling = draft.state.schooling
    kept = {delta.blob for delta in (*schooling.deltas, *_merged_now(schooling))}
    if schooling.trunk.weights is not None:
        kept.add(schooling.trunk.weights)
    if schooling.used is not None:
        kept.add(schooling.used.weights)
    unused = tuple(blob for blob in dict.fromkeys(blobs) if blob not in kept)
    if unused:
        draft.tell(ReleaseBlobs(job=draft.state.job, blobs=unused))


def _explain(draft: Draft, what: str, verdict: drafting.Verdict) -> None:
    draft.tell(
        ExplainDrafting(
            job=draft.state.job,
            what=what,  # pyright: ignore[reportArgumentType]
            # no more digits than any machine comes to
            saved=round(verdict.saved, 3),
            cost=round(verdict.cost, 3),
            why=verdict.why,
        )
    )
