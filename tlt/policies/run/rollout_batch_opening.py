"""Open rollout batches, and assign workers to the batch at hand or to the next step's.

With `algorithm.staleness: 1` idle workers decode the next step's batch. It has the weights that
were the newest when the step at hand began, whether a worker idles or not, so an answer depends on
its key and its step alone. Its unfinished answers are cut when the step at hand ends, and go on
after the update under the same weights.
"""

import msgspec

from tlt.base.id_types import Incarnation, PromptIndex, Purpose, Step, WorkerId
from tlt.policies.algorithm import prompt_order
from tlt.policies.drafter.used_and_fallback_drafters import retry_loading
from tlt.policies.run import (
    deferred_groups,
    drafter_training_scheduler,
    evaluation_answers,
    partial_rollouts,
    rollout_batch,
)
from tlt.policies.run.rollout_batch import RolloutBatch
from tlt.policies.run.run_state import (
    DUTIES,
    Duty,
    Phase,
    RunState,
    Turn,
    WorkerState,
    is_ahead,
)
from tlt.protocol.commands import IssuePrompts, RequeuePrompts, StartRollout
from tlt.protocol.refs import PolicyRef
from tlt.protocol.shared_values import WorkerInfo

ROLLOUT_PHASES = (Phase.ROLLOUT, Phase.EVALUATING)


def open_step(turn: Turn) -> None:
    """Begin a step with the batch that workers have decoded ahead, or with a new one.

    The next step's batch is opened at once, so that its prompts don't depend on timing.
    """
    turn.enter(Phase.ROLLOUT)
    ahead, algorithm = turn.state.ahead, turn.state.spec.algorithm
    if ahead is None:
        turn.set(batch=_new_step(turn, turn.state.step))
        turn.set_later(carried={})
    else:
        keeps = drafter_training_scheduler.may_train(turn)
        begun = msgspec.structs.replace(ahead, opened_at=turn.now, keep_answers=keeps)
        turn.set(batch=begun)
        turn.set_later(ahead=None)
    if algorithm.staleness and turn.state.step + 1 < algorithm.steps:
        turn.set_later(ahead=_new_step(turn, Step(turn.state.step + 1)))


def _new_step(turn: Turn, step: Step) -> RolloutBatch:
    state = turn.state
    spec, total = state.spec, state.train_prompts
    cursor = state.cursor or prompt_order.cursor_at(spec, state.step, total)
    intake = deferred_groups.plan_intake(state, cursor)
    count = partial_rollouts.count_new_groups(state, intake.new)
    prompts, cursor = prompt_order.take(spec, cursor, total, count, state.carried)
    prompts = (*intake.again, *prompts)
    turn.set(cursor=deferred_groups.begin(cursor, intake.again))
    drafter_training_scheduler.open_step(turn, step, prompts)
    members = (spec.algorithm.group_size,) * len(prompts)
    return _new_batch(turn, step, "train", prompts, members, ends_early=intake.ends_early)


def open_evaluation(turn: Turn) -> None:
    turn.enter(Phase.EVALUATING)
    members = evaluation_answers.answers_by_prompt(turn.state)
    prompts = tuple(PromptIndex(i) for i in range(len(members)))
    turn.set(batch=_new_batch(turn, turn.state.step, "eval", prompts, members))
    assign_all(turn)


def _new_batch(
    turn: Turn,
    step: Step,
    purpose: Purpose,
    prompts: tuple[PromptIndex, ...],
    members: tuple[int, ...],
    *,
    ends_early: bool = False,
) -> RolloutBatch:
    state = turn.state
    opened = msgspec.structs.replace(
        rollout_batch.new_batch(step, purpose, prompts, members),
        version=state.policy.version,
        keep_answers=drafter_training_scheduler.may_train(turn),
        opened_at=turn.now,
    )
    if ends_early:
        opened = partial_rollouts.end_early(state, opened)
        opened = partial_rollouts.resume(turn, opened)
    turn.emit(
        IssuePrompts(
            job=state.job,
            epoch=state.epoch,
            step=step,
            purpose=purpose,
            prompts=prompts,
            members=max(members, default=0),
            members_by_prompt=members if len(set(members)) > 1 else (),
        )
    )
    return opened


def assign_all(turn: Turn) -> None:
    ranks = _count_ranks(turn.state)
    for worker in turn.state.workers:
        _assign(turn, worker, turn.state.batch, ranks)


def _assign_here(turn: Turn) -> None:
    """Assign workers to the batch at hand; those that decode ahead only if there are no others."""
    workers = turn.state.workers
    here = [worker for worker, known in workers.items() if not known.decodes_ahead]
    if all(workers[worker].duty is Duty.RESTARTING for worker in here):
        here = [*workers]
    ranks = _count_ranks(turn.state)
    for worker in here:
        _assign(turn, worker, turn.state.batch, ranks)


def assign(turn: Turn, worker: WorkerId) -> None:
    """Assign a worker to the batch at hand; one that trains the drafter has to stop first."""
    _assign(turn, worker, turn.state.batch, _count_ranks(turn.state))


def assign_next(turn: Turn, worker: WorkerId) -> bool:
    """Assign a worker to the batch at hand or the next step's, unless it has drained them."""
    state, drained = turn.state, turn.state.workers[worker].drained
    ahead = state.ahead if state.phase is Phase.ROLLOUT else None
    for batch in (state.batch, ahead):
        if batch is None or batch.queue_key in drained:
            continue
        # all of it may be decoded
        if batch is state.batch or batch.unfinished:
            _assign(turn, worker, batch, _count_ranks(state))
            return True
    return False


def batch_of(state: RunState, worker: WorkerState) -> RolloutBatch | None:
    """Return the batch that a worker was last assigned to."""
    return state.ahead if worker.ahead else state.batch


def cut_ahead(turn: Turn) -> None:
    """Cut the answers of the next step, which go on after the update."""
    if turn.state.ahead is not None:
        for known in turn.state.workers.values():
            if known.decodes_ahead:
                turn.cut(known)


def _count_ranks(state: RunState) -> int:
    return sum([worker.info.ranks for worker in state.workers.values()])


def _assign(turn: Turn, worker: WorkerId, batch: RolloutBatch | None, ranks: int) -> None:
    state, current = turn.state, turn.state.workers[worker]
    if batch is None:
        return
    if Duty.ROLLOUT not in DUTIES[current.duty]:
        drafter_training_scheduler.stop(turn, worker)
        return
    ahead = is_ahead(state, batch)
    if current.decodes_ahead and not ahead:
        turn.cut(current)
    turn.assign(worker, Duty.ROLLOUT, refills=batch.refills, ahead=ahead)
    adoption = retry_loading(state.drafter.adoption, current.info.incarnation)
    turn.set_drafter(adoption=adoption)
    turn.emit(
        StartRollout(
            worker=worker,
            incarnation=current.info.incarnation,
            job=state.job,
            epoch=state.epoch,
            step=batch.step,
            purpose=batch.purpose,
            policy=_policy_of(state, batch),
            drafter=adoption.used,
            requeues=batch.refills,
            share=_share(state, batch, current.info, ranks),
            keep_answers=batch.keep_answers,
            speculate=state.speculation_allowed,
        )
    )


def _policy_of(state: RunState, batch: RolloutBatch) -> PolicyRef:
    """Return the weights that a batch began with, or the newest if a lost session had those."""
    previous = state.policy.previous
    if previous is None or previous.version != batch.version or batch.purpose == "eval":
        return state.policy.current
    return previous


def _share(state: RunState, batch: RolloutBatch, info: WorkerInfo, ranks: int) -> int:
    """Return a worker's part of the answers; `ranks` are those of all workers."""
    if not state.spec.rollout.spread:
        return batch.unsettled
    return -(-batch.unsettled * info.ranks // ranks)


def requeue(turn: Turn, incarnation: Incarnation) -> None:
    """Return the prompts that an incarnation held to the queue, and assign idle workers again.

    This is repeated when the worker next joins or is lost, because a worker that outlived its lease
    may have taken more prompts.
    """
    state = turn.state
    turn.emit(
        RequeuePrompts(job=state.job, incarnation=incarnation, excused=state.phase is Phase.PAUSED)
    )
    for batch in (state.batch, state.ahead):
        if batch is not None:
            refill(turn, batch)


def refill(turn: Turn, batch: RolloutBatch) -> None:
    """Count prompts that were added to the queue of an open batch, and assign idle workers."""
    refilled = msgspec.structs.replace(batch, requeues=batch.requeues + 1)
    turn.set_batch(refilled)
    if turn.state.phase not in ROLLOUT_PHASES:
        return
    if not is_ahead(turn.state, refilled):
        _assign_here(turn)
        return
    for worker, known in turn.state.workers.items():
        if known.duty is not Duty.ROLLOUT:
            assign_next(turn, worker)
