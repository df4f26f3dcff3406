"""Open rollout batches, and assign workers to the batch at hand."""

import msgspec

from tlt.base.id_types import Incarnation, PromptIndex, Purpose, WorkerId
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
from tlt.policies.run.run_state import DUTIES, Duty, Phase, RunState, Turn
from tlt.protocol.commands import IssuePrompts, RequeuePrompts, StartRollout
from tlt.protocol.shared_values import WorkerInfo

ROLLOUT_PHASES = (Phase.ROLLOUT, Phase.EVALUATING)


def open_step(turn: Turn) -> None:
    state = turn.state
    spec, total = state.spec, state.train_prompts
    cursor = state.cursor or prompt_order.cursor_at(spec, state.step, total)
    intake = deferred_groups.plan_intake(state, cursor)
    count = partial_rollouts.count_new_groups(state, intake.new)
    prompts, cursor = prompt_order.take(spec, cursor, total, count, state.carried)
    prompts = (*intake.again, *prompts)
    turn.set(cursor=deferred_groups.begin(cursor, intake.again))
    turn.enter(Phase.ROLLOUT)
    drafter_training_scheduler.open_step(turn, prompts)
    members = (spec.algorithm.group_size,) * len(prompts)
    _open_batch(turn, "train", prompts, members, ends_early=intake.ends_early)


def open_evaluation(turn: Turn) -> None:
    turn.enter(Phase.EVALUATING)
    members = evaluation_answers.answers_by_prompt(turn.state)
    prompts = tuple(PromptIndex(i) for i in range(len(members)))
    _open_batch(turn, "eval", prompts, members)


def _open_batch(
    turn: Turn,
    purpose: Purpose,
    prompts: tuple[PromptIndex, ...],
    members: tuple[int, ...],
    *,
    ends_early: bool = False,
) -> None:
    state = turn.state
    opened = msgspec.structs.replace(
        rollout_batch.new_batch(state.step, purpose, prompts, members),
        keep_answers=drafter_training_scheduler.may_train(turn),
        opened_at=turn.now,
    )
    if ends_early:
        opened = partial_rollouts.end_early(state, opened)
        turn.set(carried={})
        opened = partial_rollouts.resume(turn, opened)
    turn.set(batch=opened)
    turn.emit(
        IssuePrompts(
            job=state.job,
            epoch=state.epoch,
            step=state.step,
            purpose=purpose,
            prompts=prompts,
            members=max(members, default=0),
            members_by_prompt=members if len(set(members)) > 1 else (),
        )
    )
    # it may be complete by what was carried over
    if not opened.settled:
        assign_all(turn)


def assign_all(turn: Turn) -> None:
    ranks = _count_ranks(turn.state)
    for worker in turn.state.workers:
        _assign(turn, worker, ranks)


def assign(turn: Turn, worker: WorkerId) -> None:
    """Assign a worker to the batch at hand; one that trains the drafter has to stop first."""
    _assign(turn, worker, _count_ranks(turn.state))


def _count_ranks(state: RunState) -> int:
    return sum([worker.info.ranks for worker in state.workers.values()])


def _assign(turn: Turn, worker: WorkerId, ranks: int) -> None:
    state, current = turn.state, turn.state.workers[worker]
    if state.batch is None:
        return
    if Duty.ROLLOUT not in DUTIES[current.duty]:
        drafter_training_scheduler.stop(turn, worker)
        return
    turn.assign(worker, Duty.ROLLOUT, refills=state.batch.refills)
    adoption = retry_loading(state.drafter.adoption, current.info.incarnation)
    turn.set_drafter(adoption=adoption)
    turn.emit(
        StartRollout(
            worker=worker,
            incarnation=current.info.incarnation,
            job=state.job,
            epoch=state.epoch,
            step=state.batch.step,
            purpose=state.batch.purpose,
            policy=state.policy.current,
            drafter=adoption.used,
            requeues=state.batch.refills,
            share=_share(state, state.batch, current.info, ranks),
            keep_answers=state.batch.keep_answers,
            speculate=state.speculation_allowed,
        )
    )


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
    if state.batch is not None:
        refill(turn, state.batch)


def refill(turn: Turn, batch: RolloutBatch) -> None:
    """Count prompts that were added to the queue of the open batch, and assign idle workers."""
    turn.set(batch=msgspec.structs.replace(batch, requeues=batch.requeues + 1))
    if turn.state.phase in ROLLOUT_PHASES:
        assign_all(turn)
