"""Move a run from one phase to the next.

A step is a rollout batch, then policy updates until the target version is published. Evaluations
are rollout batches without an update.
"""

import math

from tlt.base.id_types import JobStatus, PolicyVersion, PromptIndex, Step
from tlt.policies.algorithm import prompt_mixture, prompt_order
from tlt.policies.run import (
    adopt_reject_revert,
    best_policy,
    drafter_training_scheduler,
    dynamic_sampling,
    partial_rollouts,
    policy_updates,
    rollout_batch_opening,
    stop_losing_speculation,
)
from tlt.policies.run.evaluation_answers import split_into_sets
from tlt.policies.run.policy_updates import plan_update
from tlt.policies.run.rollout_batch import RolloutBatch
from tlt.policies.run.run_state import Phase, RunState, Turn
from tlt.protocol.commands import CloseJob, EndJob, RecordRolloutBatch
from tlt.spec.prompt_files import names_in_rows


def close_batch(turn: Turn) -> None:
    state, batch = turn.state, turn.state.batch
    assert batch is not None
    if batch.purpose == "train":
        batch = partial_rollouts.split(turn, batch)
        rollout_batch_opening.cut_ahead(turn)
    turn.set(batch=None)
    stop_losing_speculation.account_for_batch(turn, batch)
    drafter_training_scheduler.record_rollout(turn, turn.now - batch.opened_at)
    turn.emit(
        RecordRolloutBatch(
            job=state.job,
            step=batch.step,
            purpose=batch.purpose,
            version=state.policy.version,
            rewards=tuple(batch.rewards()),
            parts={
                **{f"environment/{name}": mean for name, mean in batch.mean_measured().items()},
                **batch.mean_parts([reward.label for reward in state.spec.rewards]),
            },
            sets=split_into_sets(state, batch) if batch.purpose == "eval" else (),
            sources=_mean_by_source(state, batch),
        )
    )
    if not batch.rewards() and batch.dropped < len(batch.lengths()):
        what = "step" if batch.purpose == "train" else "the evaluation after step"
        complaint = f"no answer of {what} {batch.step} could be scored"
        log = "environment" if state.spec.environment else "reward-function"
        end_job(turn, "failed", f"{complaint}; see logs/{log}.log")
        return
    if batch.purpose == "eval":
        best_policy.keep_best(turn, batch)
        if state.step >= state.spec.algorithm.steps:
            end_job(turn, "done", None)
        else:
            _open_step(turn)
        return
    version = state.policy.version
    turn.set_policy(
        plans={**state.policy.plans, version: plan_update(batch, state.spec)},
        target_version=PolicyVersion(version + 1),
    )
    if (cursor := turn.state.cursor) is not None:
        solved = [prompt for prompt, group in batch.groups.items() if group.solved]
        turn.set(cursor=prompt_order.skip_solved(state.spec, cursor, solved))
    enter_policy_update(turn)


def _mean_by_source(state: RunState, batch: RolloutBatch) -> dict[str, float]:
    """Return the mean reward of each source, over the answers that have one.

    Without a mixture and without names in the rows there is only one.
    """
    data = state.spec.data
    if batch.purpose == "eval" or not (data.mixed or names_in_rows(data)):
        return {}
    rewards: dict[str, list[float]] = {}
    for prompt, group in batch.groups.items():
        label = _source_label(state, prompt)
        for score in filter(None, (answer.score for answer in group.members)):
            if score.reward is not None:
                rewards.setdefault(score.source or label, []).append(score.reward)
    return {name: math.fsum(found) / len(found) for name, found in rewards.items() if found}


def _source_label(state: RunState, prompt: PromptIndex) -> str:
    index = 0
    if state.cursor is not None and state.cursor.sources:
        index = prompt_mixture.source_of(state.cursor, prompt)
    return state.spec.data.sources[index].label


def enter_policy_update(turn: Turn) -> None:
    turn.enter(Phase.POLICY_UPDATE)
    drafter_training_scheduler.stop_all(turn)
    advance_update(turn)


def advance(turn: Turn) -> None:
    """Continue a phase that waited for workers which are now idle or lost."""
    if turn.state.phase is Phase.POLICY_UPDATE:
        advance_update(turn)


def advance_update(turn: Turn) -> None:
    """Start the next policy update, or leave the phase if the target is published."""
    if policy_updates.is_waiting(turn.state):
        return
    if not policy_updates.is_published(turn.state):
        policy_updates.start_update(turn)
    elif turn.state.batch is not None:
        _resume_batch(turn, turn.state.batch)
    else:
        _open_next_step(turn)


def _resume_batch(turn: Turn, batch: RolloutBatch) -> None:
    """Continue the batch that was open when a lost policy was restored."""
    turn.enter(Phase.ROLLOUT if batch.purpose == "train" else Phase.EVALUATING)
    if batch.settled:
        close_batch(turn)
    else:
        rollout_batch_opening.assign_all(turn)


def _open_next_step(turn: Turn) -> None:
    step, algorithm = Step(turn.state.step + 1), turn.state.spec.algorithm
    turn.set(step=step)
    last = step >= algorithm.steps
    if algorithm.eval_every > 0 and (last or step % algorithm.eval_every == 0):
        rollout_batch_opening.open_evaluation(turn)
    elif last:
        end_job(turn, "done", None)
    else:
        _open_step(turn)


def _open_step(turn: Turn) -> None:
    was_ahead = turn.state.ahead is not None
    rollout_batch_opening.open_step(turn)
    if was_ahead:
        dynamic_sampling.replace_agreed(turn)
    # all that it needs may have been decoded before
    if turn.state.batch is not None and turn.state.batch.settled:
        close_batch(turn)
    else:
        rollout_batch_opening.assign_all(turn)


def end_job(turn: Turn, status: JobStatus, error: str | None) -> None:
    state = turn.state
    turn.enter(Phase.ENDED)
    for worker in state.workers.values():
        turn.emit(
            CloseJob(worker=worker.info.worker, incarnation=worker.info.incarnation, job=state.job)
        )
    policy_updates.end(turn)
    adopt_reject_revert.end(turn)
    turn.emit(EndJob(job=state.job, status=status, error=error))
