"""The loop inside the loop: idle workers train the drafter, and stop the moment they are needed.

A worker that trains has duty DRAFT. It leaves that duty only by saying so
(`DrafterTrainingStopped`) or when its ranks die, so no worker trains and decodes at once.
"""

from collections.abc import Sequence

import msgspec

from tlt.ids import PromptIndex, WorkerId
from tlt.policies.drafter import gate, lineage, speedup_model
from tlt.policies.drafter.data_selection import held_out
from tlt.policies.drafter.training_state import Merging
from tlt.policies.job.rollout_batch import RolloutBatch
from tlt.policies.job.run_state import Duty, Phase, RunState, Turn, WorkerState
from tlt.protocol.commands import StopDrafterTraining, TrainDrafter
from tlt.protocol.events import (
    DrafterCommitFailed,
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterRefused,
    DrafterTrainingStopped,
)
from tlt.protocol.records import StrategyTally

_TRAINS = (Duty.DRAFTER_TRAINING, Duty.STOPPING)
# deltas of each rank of a member that was asked to merge, before it is not expected to any more
_PATIENCE = 16


def is_trained(state: RunState) -> bool:
    """Whether some worker trains, or has not said yet that it has stopped."""
    return any(worker.duty in _TRAINS for worker in state.workers.values())


def _is_wanted(state: RunState) -> bool:
    """Nobody asks a drafter once speculation was given up."""
    return state.spec.drafter.train != "off" and state.speculation_allowed


def is_merging(state: RunState, worker: WorkerId) -> bool:
    merging = state.drafter_state.merging
    return merging is not None and merging.worker == worker


# --- a worker's lesson --------------------------------------------------------------------------


def begin_if_worth(turn: Turn, worker: WorkerId) -> None:
    """An idle worker trains, or stays idle."""
    state = turn.state
    if not _is_wanted(state) or lineage.lacks(state, state.workers[worker]):
        return
    verdict = gate.worth_training(state.spec, state.drafter_state, _ahead(turn), state.step)
    if not is_trained(state):
        lineage.explain(turn, "train" if verdict.worth else "rest", verdict)
    if verdict.worth:
        _begin(turn, worker)


def hold_out(turn: Turn, prompts: Sequence[PromptIndex]) -> None:
    """Some of a step's prompts; those of the step before are known still."""
    step, known = turn.state.step, turn.state.drafter_state.held_out
    before = {number: held for number, held in known.items() if number == step - 1}
    lineage.change(turn, held_out={**before, step: held_out(step, prompts)})
    turn.set(drafter_state=gate.reckoned(turn.state.drafter_state))


def answered(turn: Turn, answers: RolloutBatch) -> None:
    """By a round that is over there is more to learn from."""
    drafter_state = turn.state.drafter_state
    held = drafter_state.held_out.get(answers.step, ())
    tokens = sum(
        answer.length
        for prompt, group in answers.groups.items()
        if prompt not in held
        for answer in group.members
    )
    lineage.change(turn, tokens=drafter_state.tokens + tokens)


def look_again(turn: Turn) -> None:
    """There is another answer to learn from: who is idle for want of one may begin."""
    state = turn.state
    if not _is_wanted(state) or state.phase not in (Phase.ROLLOUT, Phase.EVALUATING):
        return
    idle = [
        worker
        for worker, known in state.workers.items()
        if known.duty is Duty.IDLE and not lineage.lacks(state, known)
    ]
    if not idle:
        return
    if gate.worth_training(state.spec, state.drafter_state, _ahead(turn), state.step).worth:
        for worker in idle:
            _begin(turn, worker)


def _begin(turn: Turn, worker: WorkerId) -> None:
    drafter_state = turn.state.drafter_state
    training_session = drafter_state.micro_batches + 1
    turn.set(drafter_state=msgspec.structs.replace(drafter_state, micro_batches=training_session))
    turn.assign(worker, Duty.DRAFTER_TRAINING, training_session=training_session)
    begun = turn.state.workers[worker]
    _tell_trunk(turn, begun)
    if (
        drafter_state.merging is None
        and lineage.is_due(turn.state)
        and _can_merge(turn.state, begun)
    ):
        lineage.ask_to_merge(turn, begun)  # the last one who was asked had to stop


def _can_merge(state: RunState, worker: WorkerState) -> bool:
    """A first trunk is made by somebody who has begun it."""
    drafter_state = state.drafter_state
    return drafter_state.base.weights is not None or not _members(worker).isdisjoint(
        drafter_state.handed_in
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
            training_session=worker.training_session,
            base=state.drafter_state.base,
            held_out=state.drafter_state.held_out,
        )
    )


def _tell_members(turn: Turn) -> None:
    stop_who_lacks(turn)
    for worker in turn.state.workers.values():
        if worker.duty is Duty.DRAFTER_TRAINING:
            _tell_trunk(turn, worker)


def preempt(turn: Turn, worker: WorkerId) -> None:
    current = turn.state.workers[worker]
    if current.duty is not Duty.DRAFTER_TRAINING:
        return
    turn.assign(worker, Duty.STOPPING)
    turn.tell(
        StopDrafterTraining(
            worker=worker,
            incarnation=current.info.incarnation,
            job=turn.state.job,
            training_session=current.training_session,
        )
    )


def preempt_all(turn: Turn) -> None:
    for worker in turn.state.workers:
        preempt(turn, worker)


def preempted(turn: Turn, event: DrafterTrainingStopped) -> bool:
    """Whether it is news."""
    worker = turn.state.workers.get(event.worker)
    if worker is None or worker.info.incarnation != event.incarnation:
        return False
    if worker.duty not in _TRAINS or worker.training_session != event.training_session:
        return False
    turn.assign(event.worker, Duty.IDLE)
    lineage.merge_no_more(turn, worker)
    return True


def lost(turn: Turn, worker: WorkerState) -> None:
    """Nothing more is heard of its ranks; what they handed in is not lost."""
    lineage.merge_no_more(turn, worker)
    drafter_state = turn.state.drafter_state
    members = _members(worker)
    if members.isdisjoint(drafter_state.handed_in):
        return
    lineage.change(
        turn,
        handed_in={m: number for m, number in drafter_state.handed_in.items() if m not in members},
        joined={m: version for m, version in drafter_state.joined.items() if m not in members},
    )


# --- what members say ---------------------------------------------------------------------------


def learned(turn: Turn, event: DrafterDeltaReady) -> None:
    state, delta = turn.state, event.delta
    drafter_state = state.drafter_state
    worker = state.workers.get(delta.worker)
    if worker is None or worker.info.incarnation != delta.incarnation:
        return
    if delta.number <= drafter_state.handed_in.get(delta.member, -1):
        lineage.release(turn, (delta.blob,))  # it came late, or again
        return
    idle = state.phase is not Phase.RESERVED_TRAINING
    lineage.change(
        turn,
        handed_in={**drafter_state.handed_in, delta.member: delta.number},
        updates=drafter_state.updates + event.updates,
        read=drafter_state.read + event.tokens.total,
        idle_updates=drafter_state.idle_updates + (event.updates if idle else 0),
        seconds=drafter_state.seconds + event.seconds + event.reading_seconds,
        bought=max(0.0, drafter_state.bought - event.seconds - event.reading_seconds),
    )
    lineage.collect(turn, delta)
    if worker.duty is Duty.DRAFTER_TRAINING:
        _merge_if_due(turn, worker)


def _merge_if_due(turn: Turn, worker: WorkerState) -> None:
    state = turn.state
    drafter_state = state.drafter_state
    if drafter_state.merging is not None:
        _wait(turn, drafter_state.merging, worker)
        return
    last = state.phase is Phase.RESERVED_TRAINING and drafter_state.bought <= 0.0
    if last and not drafter_state.deltas:
        preempt_all(turn)
    elif last or lineage.is_due(state):
        lineage.ask_to_merge(turn, worker)


def _wait(turn: Turn, merging: Merging, worker: WorkerState) -> None:
    """Whoever goes on learning instead has not got what it was asked, or not listened."""
    if worker.info.incarnation != merging.incarnation:
        return
    since = merging.since + 1
    lineage.change(turn, merging=msgspec.structs.replace(merging, since=since))
    if since >= _PATIENCE * worker.info.ranks:
        preempt(turn, merging.worker)


def trained(turn: Turn, event: DrafterMerged) -> None:
    worker = turn.state.workers.get(event.worker)
    if worker is None or worker.info.incarnation != event.incarnation:
        return
    if lineage.lacks(turn.state, worker):
        lineage.merge_no_more(turn, worker)  # it was measured against something else
    if lineage.grow(turn, event):
        _go_on(turn)


def asked(turn: Turn, tallies: Sequence[StrategyTally]) -> None:
    """What the drafter in use came to in rollouts."""
    if _is_wanted(turn.state) and lineage.falls(turn, tallies):
        _tell_members(turn)


def not_kept(turn: Turn, event: DrafterCommitFailed) -> None:
    if lineage.not_kept(turn, event):
        _tell_members(turn)


def refused(turn: Turn, event: DrafterRefused) -> None:
    worker = turn.state.workers.get(event.worker)
    if worker is None or worker.info.incarnation != event.incarnation:
        return
    if lineage.refused(turn, event):
        _tell_members(turn)
    else:
        stop_who_lacks(turn)


def stop_who_lacks(turn: Turn) -> None:
    """What others use: it would begin elsewhere, and measure what it made against less."""
    for worker, known in turn.state.workers.items():
        if lineage.lacks(turn.state, known):
            preempt(turn, worker)


def _go_on(turn: Turn) -> None:
    """With the new trunk, if it is still worth it."""
    state = turn.state
    members = [w for w in state.workers.values() if w.duty is Duty.DRAFTER_TRAINING]
    ahead = _ahead(turn)
    if state.phase is Phase.RESERVED_TRAINING:
        still = gate.purchase(state.spec, state.drafter_state, ahead, state.step)
        worth = state.drafter_state.bought > 0.0 and still.worth
    else:
        verdict = gate.worth_training(state.spec, state.drafter_state, ahead, state.step)
        worth = verdict.worth
        if not worth and members:
            lineage.explain(turn, "rest", verdict)
    for worker in members:
        if worth and state.speculation_allowed:
            _tell_trunk(turn, worker)
        else:
            preempt(turn, worker.info.worker)


def spoiled(turn: Turn, event: DrafterDiverged) -> None:
    worker = turn.state.workers.get(event.worker)
    if worker is None or worker.info.incarnation != event.incarnation:
        return
    if worker.duty not in _TRAINS or worker.training_session != event.training_session:
        return
    if event.base != turn.state.drafter_state.base.version:
        return  # what it could not read, or spoiled, was replaced: it has been told by what
    turn.set(drafter_state=gate.in_vain(turn.state.drafter_state, turn.state.step))
    lineage.start_over(turn, event.error)
    preempt_all(turn)


def blobs_lost(turn: Turn) -> None:
    """What was in flight is gone; the drafter that is used was committed."""
    lineage.new_root(turn)
    _tell_members(turn)


# --- seconds that are bought --------------------------------------------------------------------


def buy(turn: Turn) -> bool:
    """After a round, all workers may train for a while before they learn."""
    state = turn.state
    if not _is_wanted(state) or not state.workers:
        return False
    verdict = gate.purchase(state.spec, state.drafter_state, _ahead(turn), state.step)
    members = [
        worker
        for worker, known in state.workers.items()
        if known.duty in (Duty.IDLE, Duty.ROLLOUT, Duty.DRAFTER_TRAINING)
        and not lineage.lacks(state, known)
    ]
    if not verdict.worth or not members:
        return False
    lineage.explain(turn, "buy", verdict)
    ranks = sum(state.workers[worker].info.ranks for worker in members)
    lineage.change(turn, bought=verdict.cost * ranks)
    for worker in members:
        if state.workers[worker].duty is not Duty.DRAFTER_TRAINING:
            _begin(turn, worker)
    return True


# ------------------------------------------------------------------------------------------------


def _ahead(turn: Turn) -> gate.TrainingOutlook:
    state = turn.state
    members = sum(worker.info.ranks for worker in state.workers.values())
    rolled = state.rollout_seconds
    if not rolled and state.batch is not None:
        # the first round has taken so long at least
        rolled = state.batch.longest or turn.now - state.batch_opened_at
    opened = state.phase is not Phase.EVALUATING
    steps = state.spec.algorithm.steps - state.step - opened
    undrafted = state.drafter_state.undrafted or speedup_model.without(
        state.spec, state.decode_costs
    )
    most = gate.to_learn(state.drafter_state)
    idle = gate.taught_idly(state.drafter_state, state.step + 1)
    return gate.outlook(steps, rolled, members, undrafted, most, idle)
