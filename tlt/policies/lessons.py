"""The loop inside the loop: idle workers train the drafter, and stop the moment they are needed.

A worker that trains has duty DRAFT. It leaves that duty only by saying so (`DrafterPreempted`), or
with its ranks; so nobody trains and decodes, or learns, at once.
"""

from collections.abc import Sequence

import msgspec

from tlt.messages import (
    DrafterLearned,
    DrafterNotKept,
    DrafterPreempted,
    DrafterRefused,
    DrafterSpoiled,
    DrafterTrained,
    PreemptDrafter,
    StrategyTally,
    TrainDrafter,
)
from tlt.policies import drafting, pace, trunks
from tlt.policies.rounds import Round
from tlt.policies.run_state import Duty, Phase, RunState, Turn, WorkerState
from tlt.policies.sampling import held_out
from tlt.policies.schooling import Merging
from tlt.types import PromptIndex, WorkerId

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


def begin_if_worth(turn: Turn, worker: WorkerId) -> None:
    """An idle worker trains, or stays idle."""
    state = turn.state
    if not _is_wanted(state) or trunks.lacks(state, state.workers[worker]):
        return
    verdict = drafting.worth_training(state.spec, state.schooling, _ahead(turn), state.step)
    if not is_trained(state):
        trunks.explain(turn, "train" if verdict.worth else "rest", verdict)
    if verdict.worth:
        _begin(turn, worker)


def hold_out(turn: Turn, prompts: Sequence[PromptIndex]) -> None:
    """Some of a step's prompts; those of the step before are known still."""
    step, known = turn.state.step, turn.state.schooling.held_out
    before = {number: held for number, held in known.items() if number == step - 1}
    trunks.change(turn, held_out={**before, step: held_out(step, prompts)})
    turn.set(schooling=drafting.reckoned(turn.state.schooling))


def answered(turn: Turn, answers: Round) -> None:
    """By a round that is over there is more to learn from."""
    schooling = turn.state.schooling
    held = schooling.held_out.get(answers.step, ())
    tokens = sum(
        answer.length
        for prompt, group in answers.groups.items()
        if prompt not in held
        for answer in group.members
    )
    trunks.change(turn, tokens=schooling.tokens + tokens)


def look_again(turn: Turn) -> None:
    """There is another answer to learn from: who is idle for want of one may begin."""
    state = turn.state
    if not _is_wanted(state) or state.phase not in (Phase.ROLLING, Phase.EVALUATING):
        return
    idle = [
        worker
        for worker, known in state.workers.items()
        if known.duty is Duty.IDLE and not trunks.lacks(state, known)
    ]
    if not idle:
        return
    if drafting.worth_training(state.spec, state.schooling, _ahead(turn), state.step).worth:
        for worker in idle:
            _begin(turn, worker)


def _begin(turn: Turn, worker: WorkerId) -> None:
    schooling = turn.state.schooling
    lesson = schooling.lessons + 1
    turn.set(schooling=msgspec.structs.replace(schooling, lessons=lesson))
    turn.assign(worker, Duty.DRAFT, lesson=lesson)
    begun = turn.state.workers[worker]
    _tell_trunk(turn, begun)
    if schooling.merging is None and trunks.is_due(turn.state) and _can_merge(turn.state, begun):
        trunks.ask_to_merge(turn, begun)  # the last one who was asked had to stop


def _can_merge(state: RunState, worker: WorkerState) -> bool:
    """A first trunk is made by somebody who has begun it."""
    schooling = state.schooling
    return schooling.trunk.weights is not None or not _members(worker).isdisjoint(
        schooling.handed_in
    )


def _members(worker: WorkerState) -> set[str]:
    return {f"{worker.info.incarnation}.{rank}" for rank in range(worker.info.ranks)}


def _tell_trunk(turn: Turn, worker: WorkerState) -> None:
    state = turn.state
    turn.tell(
        TrainDrafter(
            worker=worker.info.worker,
            incarnation=worker.info.incarnation,
            job=state.job,
            step=state.step,
            lesson=worker.lesson,
            trunk=state.schooling.trunk,
            held_out=state.schooling.held_out,
        )
    )


def _tell_members(turn: Turn) -> None:
    stop_who_lacks(turn)
    for worker in turn.state.workers.values():
        if worker.duty is Duty.DRAFT:
            _tell_trunk(turn, worker)


def preempt(turn: Turn, worker: WorkerId) -> None:
    current = turn.state.workers[worker]
    if current.duty is not Duty.DRAFT:
        return
    turn.assign(worker, Duty.PREEMPTING)
    turn.tell(
        PreemptDrafter(
            worker=worker,
            incarnation=current.info.incarnation,
            job=turn.state.job,
            lesson=current.lesson,
        )
    )


def preempt_all(turn: Turn) -> None:
    for worker in turn.state.workers:
        preempt(turn, worker)


def preempted(turn: Turn, event: DrafterPreempted) -> bool:
    """Whether it is news."""
    worker = turn.state.workers.get(event.worker)
    if worker is None or worker.info.incarnation != event.incarnation:
        return False
    if worker.duty not in _TRAINS or worker.lesson != event.lesson:
        return False
    turn.assign(event.worker, Duty.IDLE)
    trunks.merge_no_more(turn, worker)
    return True


def lost(turn: Turn, worker: WorkerState) -> None:
    """Nothing more is heard of its ranks; what they handed in is not lost."""
    trunks.merge_no_more(turn, worker)
    schooling = turn.state.schooling
    members = _members(worker)
    if members.isdisjoint(schooling.handed_in):
        return
    trunks.change(
        turn,
        handed_in={m: number for m, number in schooling.handed_in.items() if m not in members},
        joined={m: version for m, version in schooling.joined.items() if m not in members},
    )


# --- what members say ---------------------------------------------------------------------------


def learned(turn: Turn, event: DrafterLearned) -> None:
    state, delta = turn.state, event.delta
    schooling = state.schooling
    worker = state.workers.get(delta.worker)
    if worker is None or worker.info.incarnation != delta.incarnation:
        return
    if delta.number <= schooling.handed_in.get(delta.member, -1):
        trunks.release(turn, (delta.blob,))  # it came late, or again
        return
    idle = state.phase is not Phase.DRAFTING
    trunks.change(
        turn,
        handed_in={**schooling.handed_in, delta.member: delta.number},
        updates=schooling.updates + event.updates,
        read=schooling.read + event.tokens.total,
        idle_updates=schooling.idle_updates + (event.updates if idle else 0),
        seconds=schooling.seconds + event.seconds + event.reading_seconds,
        bought=max(0.0, schooling.bought - event.seconds - event.reading_seconds),
    )
    trunks.collect(turn, delta)
    if worker.duty is Duty.DRAFT:
        _merge_if_due(turn, worker)


def _merge_if_due(turn: Turn, worker: WorkerState) -> None:
    state = turn.state
    schooling = state.schooling
    if schooling.merging is not None:
        _wait(turn, schooling.merging, worker)
        return
    last = state.phase is Phase.DRAFTING and schooling.bought <= 0.0
    if last and not schooling.deltas:
        preempt_all(turn)
    elif last or trunks.is_due(state):
        trunks.ask_to_merge(turn, worker)


def _wait(turn: Turn, merging: Merging, worker: WorkerState) -> None:
    """Whoever goes on learning instead has not got what it was asked, or not listened."""
    if worker.info.incarnation != merging.incarnation:
        return
    since = merging.since + 1
    trunks.change(turn, merging=msgspec.structs.replace(merging, since=since))
    if since >= _PATIENCE * worker.info.ranks:
        preempt(turn, merging.worker)


def trained(turn: Turn, event: DrafterTrained) -> None:
    worker = turn.state.workers.get(event.worker)
    if worker is None or worker.info.incarnation != event.incarnation:
        return
    if trunks.lacks(turn.state, worker):
        trunks.merge_no_more(turn, worker)  # it was measured against something else
    if trunks.grow(turn, event):
        _go_on(turn)


def asked(turn: Turn, tallies: Sequence[StrategyTally]) -> None:
    """What the drafter in use came to in rollouts."""
    if _is_wanted(turn.state) and trunks.falls(turn, tallies):
        _tell_members(turn)


def not_kept(turn: Turn, event: DrafterNotKept) -> None:
    if trunks.not_kept(turn, event):
        _tell_members(turn)


def refused(turn: Turn, event: DrafterRefused) -> None:
    worker = turn.state.workers.get(event.worker)
    if worker is None or worker.info.incarnation != event.incarnation:
        return
    if trunks.refused(turn, event):
        _tell_members(turn)
    else:
        stop_who_lacks(turn)


def stop_who_lacks(turn: Turn) -> None:
    """What others use: it would begin elsewhere, and measure what it made against less."""
    for worker, known in turn.state.workers.items():
        if trunks.lacks(turn.state, known):
            preempt(turn, worker)


def _go_on(turn: Turn) -> None:
    """With the new trunk, if it is still worth it."""
    state = turn.state
    members = [w for w in state.workers.values() if w.duty is Duty.DRAFT]
    ahead = _ahead(turn)
    if state.phase is Phase.DRAFTING:
        still = drafting.purchase(state.spec, state.schooling, ahead, state.step)
        worth = state.schooling.bought > 0.0 and still.worth
    else:
        verdict = drafting.worth_training(state.spec, state.schooling, ahead, state.step)
        worth = verdict.worth
        if not worth and members:
            trunks.explain(turn, "rest", verdict)
    for worker in members:
        if worth and state.speculates:
            _tell_trunk(turn, worker)
        else:
            preempt(turn, worker.info.worker)


def spoiled(turn: Turn, event: DrafterSpoiled) -> None:
    worker = turn.state.workers.get(event.worker)
    if worker is None or worker.info.incarnation != event.incarnation:
        return
    if worker.duty not in _TRAINS or worker.lesson != event.lesson:
        return
    if event.trunk != turn.state.schooling.trunk.version:
        return  # what it could not read, or spoiled, was replaced: it has been told by what
    turn.set(schooling=drafting.in_vain(turn.state.schooling, turn.state.step))
    trunks.start_over(turn, event.error)
    preempt_all(turn)


def blobs_lost(turn: Turn) -> None:
    """What was in flight is gone; the drafter that is used was committed."""
    trunks.new_root(turn)
    _tell_members(turn)


# --- seconds that are bought --------------------------------------------------------------------


def buy(turn: Turn) -> bool:
    """After a round, all workers may train for a while before they learn."""
    state = turn.state
    if not _is_wanted(state) or not state.workers:
        return False
    verdict = drafting.purchase(state.spec, state.schooling, _ahead(turn), state.step)
    members = [
        worker
        for worker, known in state.workers.items()
        if known.duty in (Duty.IDLE, Duty.ROLLOUT, Duty.DRAFT) and not trunks.lacks(state, known)
    ]
    if not verdict.worth or not members:
        return False
    trunks.explain(turn, "buy", verdict)
    ranks = sum(state.workers[worker].info.ranks for worker in members)
    trunks.change(turn, bought=verdict.cost * ranks)
    for worker in members:
        if state.workers[worker].duty is not Duty.DRAFT:
            _begin(turn, worker)
    return True


# ------------------------------------------------------------------------------------------------


def _ahead(turn: Turn) -> drafting.Outlook:
    state = turn.state
    members = sum(worker.info.ranks for worker in state.workers.values())
    rolled = state.rolled_seconds
    if not rolled and state.round is not None:
        # the first round has taken so long at least
        rolled = state.round.longest or turn.now - state.round_began
    opened = state.phase is not Phase.EVALUATING
    steps = state.spec.algorithm.steps - state.step - opened
    undrafted = state.schooling.undrafted or pace.without(state.spec, state.spending)
    most = drafting.to_learn(state.schooling)
    idle = drafting.taught_idly(state.schooling, state.step + 1)
    return drafting.outlook(steps, rolled, members, undrafted, most, idle)
