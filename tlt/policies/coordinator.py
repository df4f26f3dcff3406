"""One job's steps: decide(state, event, now) -> (state, commands). Nobody else changes its state.

A step is a round of rollouts, then an update that takes the policy from one version to the next.
Delivery may repeat or reorder events: what is out of place changes nothing.
"""

from typing import TypeVar, assert_never

import msgspec

from tlt.config import JobSpec
from tlt.ids import (
    Epoch,
    Incarnation,
    JobId,
    JobStatus,
    PolicyVersion,
    PromptIndex,
    Purpose,
    Step,
    WorkerId,
)
from tlt.policies.drafter import lineage, scheduler
from tlt.policies.job import blob_retention, policy_versions, rollout_batch, update_plan
from tlt.policies.job.rollout_batch import RolloutBatch
from tlt.policies.job.run_state import DUTIES, Best, Duty, Phase, RunState, Turn, WorkerState
from tlt.policies.speculation import savings_estimate
from tlt.protocol.commands import (
    CloseJob,
    CommitBestPolicy,
    FinishRun,
    GiveUpSpeculation,
    IssuePrompts,
    KeepRollout,
    OpenJob,
    RecordRolloutBatch,
    RequeuePrompts,
    RunCommand,
    StartRollout,
    StopSpeculation,
)
from tlt.protocol.events import (
    CheckpointCommitted,
    DecodingReported,
    DrafterCommitFailed,
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterRefused,
    DrafterTrainingStopped,
    JobCancelRequested,
    JobStarted,
    PolicyPublished,
    PolicyUpdateFinished,
    RolloutDropped,
    RolloutFinished,
    RolloutScored,
    RunEvent,
    SessionResumed,
    SpeculationStopped,
    WorkerFailed,
    WorkerIdled,
    WorkerJoined,
    WorkerLost,
)
from tlt.protocol.records import WorkerInfo


def new_run(job: JobId, spec: JobSpec) -> RunState:
    return RunState(job=job, epoch=Epoch(0), spec=spec, train_prompts=0, eval_prompts=0)


def decide(state: RunState, event: RunEvent, now: float) -> tuple[RunState, list[RunCommand]]:
    if state.phase is Phase.ENDED:
        return state, []
    turn = Turn(state, now)
    match event:
        case JobStarted():
            _start(turn, event)
        case JobCancelRequested():
            _end(turn, "cancelled", None)
        case SessionResumed():
            _resume(turn, event)
        case WorkerJoined():
            _join(turn, event.info)
        case WorkerLost():
            _lose(turn, event)
        case WorkerFailed():
            if _is_current(state, event):
                _end(turn, "failed", event.error)
        case RolloutFinished() | RolloutScored() | RolloutDropped():
            _settle(turn, event)
        case WorkerIdled():
            _idle(turn, event)
        case PolicyUpdateFinished():
            if _is_current(state, event) and policy_versions.learned(turn, event):
                _learn_if_due(turn)
        case PolicyPublished():
            if policy_versions.published(turn, event):
                _learn(turn)
        case CheckpointCommitted():
            policy_versions.checkpoint(turn, event)
        case DrafterDeltaReady():
            scheduler.learned(turn, event)
        case DrafterTrainingStopped():
            _preempted(turn, event)
        case DrafterMerged():
            scheduler.trained(turn, event)
        case DrafterDiverged():
            scheduler.spoiled(turn, event)
        case DrafterCommitFailed():
            scheduler.not_kept(turn, event)
        case DecodingReported():
            _weigh(turn, event)
        case DrafterRefused():
            scheduler.refused(turn, event)
        case SpeculationStopped():
            pass
        case _:
            assert_never(event)
    return turn.state, turn.commands


_FromWorker = TypeVar(
    "_FromWorker",
    WorkerFailed,
    RolloutFinished,
    WorkerIdled,
    DecodingReported,
    PolicyUpdateFinished,
)


def _is_current(state: RunState, event: _FromWorker) -> bool:
    """A worker whose incarnation is over is not heard any more."""
    worker = state.workers.get(event.worker)
    return worker is not None and worker.info.incarnation == event.incarnation


# --- the job ------------------------------------------------------------------------------------


def _start(turn: Turn, event: JobStarted) -> None:
    if turn.state.phase is not Phase.STARTING:
        return
    turn.set(
        epoch=event.epoch,
        folder=event.folder,
        train_prompts=event.train_prompts,
        eval_prompts=event.eval_prompts,
    )
    algorithm = event.spec.algorithm
    if algorithm.prompts_per_step > event.train_prompts:
        complaint = (
            f"algorithm.prompts_per_step is {algorithm.prompts_per_step}, "
            f"but data.train has {event.train_prompts} rows"
        )
        _end(turn, "failed", complaint)
        return
    for info in event.workers:
        _join(turn, info)
    if algorithm.eval_every > 0:
        _open_eval(turn)
    else:
        _open_step(turn)


def _end(turn: Turn, status: JobStatus, error: str | None) -> None:
    state = turn.state
    turn.enter(Phase.ENDED)
    for worker in state.workers.values():
        turn.tell(
            CloseJob(worker=worker.info.worker, incarnation=worker.info.incarnation, job=state.job)
        )
    policy_versions.end(turn)
    lineage.end(turn)
    turn.tell(FinishRun(job=state.job, status=status, error=error))


def _resume(turn: Turn, event: SessionResumed) -> None:
    """A new coordinator. The workers of the last session, if they are gone, are lost by name."""
    state = turn.state
    if event.epoch <= state.epoch:
        return
    turn.set(epoch=event.epoch)
    if event.blobs_kept:
        return
    scheduler.blobs_lost(turn)
    if not policy_versions.blobs_lost(turn):
        return
    if state.phase is not Phase.POLICY_UPDATE:
        turn.enter(Phase.POLICY_UPDATE)
        scheduler.preempt_all(turn)
    policy_versions.abandon(turn, "the published weights were lost")
    _learn(turn)


# --- rounds -------------------------------------------------------------------------------------


def _open_step(turn: Turn) -> None:
    state = turn.state
    prompts = rollout_batch.step_prompts(state.spec, state.step, state.train_prompts)
    turn.enter(Phase.ROLLOUT)
    scheduler.hold_out(turn, prompts)
    _open_round(turn, "train", prompts, state.spec.algorithm.group_size)


def _open_eval(turn: Turn) -> None:
    turn.enter(Phase.EVALUATING)
    prompts = tuple(PromptIndex(i) for i in range(turn.state.eval_prompts))
    _open_round(turn, "eval", prompts, 1)


def _open_round(
    turn: Turn, purpose: Purpose, prompts: tuple[PromptIndex, ...], members: int
) -> None:
    state = turn.state
    opened = rollout_batch.open_round(state.step, purpose, prompts, members)
    turn.set(batch=opened, batch_opened_at=turn.now)
    turn.tell(
        IssuePrompts(
            job=state.job,
            epoch=state.epoch,
            step=state.step,
            purpose=purpose,
            prompts=prompts,
            members=members,
        )
    )
    _roll_everybody(turn)


def _roll_everybody(turn: Turn) -> None:
    for worker in turn.state.workers:
        _roll(turn, worker)


def _roll(turn: Turn, worker: WorkerId) -> None:
    state, current = turn.state, turn.state.workers[worker]
    if state.batch is None:
        return
    if Duty.ROLLOUT not in DUTIES[current.duty]:
        # who trains the drafter rolls when it has stopped
        scheduler.preempt(turn, worker)
        return
    turn.assign(worker, Duty.ROLLOUT)
    lineage.tried_again(turn, current)
    turn.tell(
        StartRollout(
            worker=worker,
            incarnation=current.info.incarnation,
            job=state.job,
            epoch=state.epoch,
            step=state.batch.step,
            purpose=state.batch.purpose,
            policy=state.policy,
            drafter=state.drafter_state.used,
            requeues=state.batch.requeues,
            share=_share(state, state.batch, current.info),
        )
    )


def _share(state: RunState, opened: RolloutBatch, info: WorkerInfo) -> int:
    if not state.spec.rollout.spread:
        return opened.unsettled
    ranks = sum(worker.info.ranks for worker in state.workers.values())
    return -(-opened.unsettled * info.ranks // ranks)


def _settle(turn: Turn, event: RolloutFinished | RolloutScored | RolloutDropped) -> None:
    state = turn.state
    if state.batch is None or not rollout_batch.is_about(state.batch, event):
        return
    if isinstance(event, RolloutFinished) and not _is_current(state, event):
        return
    after, changed = rollout_batch.settle(state.batch, event)
    if not changed:
        return
    turn.set(batch=after)
    if isinstance(event, RolloutFinished) and event.purpose == "train":
        turn.tell(
            KeepRollout(job=state.job, step=event.step, prompt=event.prompt, member=event.member)
        )
    if after.settled and state.phase in (Phase.ROLLOUT, Phase.EVALUATING):
        _close_round(turn)
    elif isinstance(event, RolloutFinished) and event.purpose == "train":
        scheduler.look_again(turn)


def _close_round(turn: Turn) -> None:
    state = turn.state
    assert state.batch is not None
    turn.set(batch=None)
    turn.tell(
        RecordRolloutBatch(
            job=state.job,
            step=state.batch.step,
            purpose=state.batch.purpose,
            version=state.version,
            rewards=tuple(state.batch.rewards()),
        )
    )
    if state.batch.purpose == "eval":
        _judge(turn, state.batch)
        if state.step >= state.spec.algorithm.steps:
            _end(turn, "done", None)
        else:
            _open_step(turn)
        return
    plan = update_plan.plan(state.batch, state.spec)
    turn.set(
        plans={**state.plans, state.version: plan},
        target=PolicyVersion(state.version + 1),
        rollout_seconds=_pace(state, state.batch, turn.now),
    )
    scheduler.answered(turn, state.batch)
    if scheduler.buy(turn):
        turn.enter(Phase.RESERVED_TRAINING)
    else:
        _enter_learning(turn)


def _pace(state: RunState, done: RolloutBatch, now: float) -> float:
    """Of this round and those before: some prompts take three times as long as others."""
    longest, before = done.longest, state.rollout_seconds
    if longest is None:
        return before or now - state.batch_opened_at
    return 0.5 * (before + longest) if before else longest


def _enter_learning(turn: Turn) -> None:
    turn.enter(Phase.POLICY_UPDATE)
    scheduler.preempt_all(turn)
    _learn(turn)


def _preempted(turn: Turn, event: DrafterTrainingStopped) -> None:
    known = turn.state.workers.get(event.worker)
    merges = scheduler.is_merging(turn.state, event.worker)
    if known is None or not scheduler.preempted(turn, event):
        return
    opened = turn.state.batch
    if turn.state.phase not in (Phase.ROLLOUT, Phase.EVALUATING) or opened is None:
        _learn_if_due(turn)
    elif known.drained_batch != (opened.step, opened.purpose, opened.requeues):
        _roll(turn, event.worker)
    elif merges:
        # only because it did not: others may, or itself
        scheduler.begin_if_worth(turn, event.worker)


def _judge(turn: Turn, done: RolloutBatch) -> None:
    """Keep the policy that scored best so far."""
    state, rewards = turn.state, done.rewards()
    if not rewards:
        return
    mean = sum(rewards) / len(rewards)
    if state.best is not None and mean <= state.best.mean:
        return
    weights = state.policy.weights if state.spec.algorithm.keep_best else None
    turn.set(best=Best(version=state.version, mean=mean, weights=weights))
    if weights is not None:
        turn.tell(CommitBestPolicy(job=state.job, policy=state.policy, mean=mean))
    if state.best is not None:
        blob_retention.discard(turn, state.best.weights)


def _idle(turn: Turn, event: WorkerIdled) -> None:
    state = turn.state
    if not _is_current(state, event) or state.batch is None:
        return
    looked = (event.step, event.purpose, event.requeues)
    # Where entries went back to the queue since, it has been told to look again.
    if looked != (state.batch.step, state.batch.purpose, state.batch.requeues):
        return
    if state.workers[event.worker].duty is Duty.ROLLOUT:
        turn.assign(event.worker, Duty.IDLE, drained_batch=looked)
        # while a lost update is made again, it is needed for that
        if state.phase in (Phase.ROLLOUT, Phase.EVALUATING):
            scheduler.begin_if_worth(turn, event.worker)


# --- speculation --------------------------------------------------------------------------------


def _weigh(turn: Turn, event: DecodingReported) -> None:
    """What it saves is added up; where it costs more, nobody speculates any longer."""
    state = turn.state
    if not state.speculation_allowed or not _is_current(state, event):
        return
    worker = state.workers[event.worker]
    if event.serial <= worker.reported_serials.get(event.rank, 0):
        return
    heard = msgspec.structs.replace(
        worker, reported_serials={**worker.reported_serials, event.rank: event.serial}
    )
    spending = savings_estimate.add_tallies(state.decode_costs, event.tallies)
    turn.set(workers={**state.workers, event.worker: heard}, decode_costs=spending)
    if state.batch is not None:
        turn.set(batch=rollout_batch.told(state.batch, event))
    scheduler.asked(turn, event.tallies)
    lost = savings_estimate.estimate_loss(spending)
    if lost is not None and lost.low is not None and lost.high is not None:
        turn.set(speculation_allowed=False)
        turn.tell(
            GiveUpSpeculation(job=state.job, saved=lost.seconds, low=lost.low, high=lost.high)
        )
        for known in state.workers.values():
            _stop_speculation(turn, known.info)
        scheduler.preempt_all(turn)


def _stop_speculation(turn: Turn, info: WorkerInfo) -> None:
    turn.tell(StopSpeculation(worker=info.worker, incarnation=info.incarnation, job=turn.state.job))


# --- workers ------------------------------------------------------------------------------------


def _join(turn: Turn, info: WorkerInfo) -> None:
    state = turn.state
    if info.incarnation <= state.newest_incarnations.get(info.worker, -1):
        return
    known = state.workers.get(info.worker)
    if known is not None:
        _drop_worker(turn, known.info)
        if _too_many_losses(turn, known, f"{info.worker} started again"):
            return
    elif info.worker in state.newest_incarnations:
        _requeue(turn, state.newest_incarnations[info.worker])
    turn.set(
        newest_incarnations={**state.newest_incarnations, info.worker: info.incarnation},
        workers={**turn.state.workers, info.worker: WorkerState(info=info)},
        returning_workers=turn.state.returning_workers - {info.worker},
    )
    turn.tell(
        OpenJob(
            worker=info.worker,
            incarnation=info.incarnation,
            job=state.job,
            epoch=state.epoch,
            spec=state.spec,
            folder=state.folder,
        )
    )
    if not state.speculation_allowed:
        _stop_speculation(turn, info)
    if turn.state.phase in (Phase.ROLLOUT, Phase.EVALUATING):
        _roll(turn, info.worker)
    else:
        _learn_if_due(turn)
    scheduler.stop_who_lacks(turn)


def _lose(turn: Turn, event: WorkerLost) -> None:
    state = turn.state
    newest = state.newest_incarnations.get(event.worker)
    if newest is not None and event.incarnation < newest:
        return
    turn.set(newest_incarnations={**state.newest_incarnations, event.worker: event.incarnation})
    known = state.workers.get(event.worker)
    if known is None:
        never_joined = newest != event.incarnation
        if never_joined and newest is not None:
            _requeue(turn, newest)
        if never_joined or not event.returning:
            turn.set(returning_workers=turn.state.returning_workers - {event.worker})
            _learn_if_due(turn)
        return
    _drop_worker(turn, known.info)
    if event.returning:
        turn.set(returning_workers=turn.state.returning_workers | {event.worker})
    if event.with_session or not _too_many_losses(turn, known, event.reason):
        _learn_if_due(turn)


def _too_many_losses(turn: Turn, lost: WorkerState, reason: str) -> bool:
    """Count one, and fail the job past its limit. Ranks that we told to leave are no loss."""
    if lost.duty is Duty.LEAVING:
        return False
    losses, limit = turn.state.losses + 1, turn.state.spec.workers.max_restarts
    turn.set(losses=losses)
    if losses > limit:
        complaint = (
            f"worker {lost.info.worker} was lost, loss number {losses} of this job "
            f"(workers.max_restarts is {limit}): {reason}"
        )
        _end(turn, "failed", complaint)
    return losses > limit


def _drop_worker(turn: Turn, info: WorkerInfo) -> None:
    """Forget an incarnation."""
    state = turn.state
    known = state.workers[info.worker]
    turn.set(workers={k: v for k, v in state.workers.items() if k != info.worker})
    scheduler.lost(turn, known)
    _requeue(turn, info.incarnation)
    if state.phase is Phase.POLICY_UPDATE and known.duty is Duty.POLICY_UPDATE:
        policy_versions.abandon(turn, f"{info.worker} was lost during the update")


def _requeue(turn: Turn, incarnation: Incarnation) -> None:
    """What it held goes back to the queue, and idle workers look again.

    Said again when its worker is next heard of: one that outlived its lease may have taken more.
    """
    state = turn.state
    turn.tell(RequeuePrompts(job=state.job, incarnation=incarnation))
    if state.batch is None:
        return
    again = msgspec.structs.replace(state.batch, requeues=state.batch.requeues + 1)
    turn.set(batch=again)
    if state.phase in (Phase.ROLLOUT, Phase.EVALUATING):
        _roll_everybody(turn)


# --- updates ------------------------------------------------------------------------------------


def _learn_if_due(turn: Turn) -> None:
    if turn.state.phase is Phase.RESERVED_TRAINING and not scheduler.is_trained(turn.state):
        _enter_learning(turn)
    elif turn.state.phase is Phase.POLICY_UPDATE:
        _learn(turn)


def _learn(turn: Turn) -> None:
    if policy_versions.proceed(turn):
        _after_update(turn)


def _after_update(turn: Turn) -> None:
    state = turn.state
    if state.batch is not None:
        turn.enter(Phase.ROLLOUT if state.batch.purpose == "train" else Phase.EVALUATING)
        if state.batch.settled:
            _close_round(turn)
        else:
            _roll_everybody(turn)
        return
    step = Step(state.step + 1)
    turn.set(step=step)
    algorithm = state.spec.algorithm
    last = step >= algorithm.steps
    if algorithm.eval_every > 0 and (last or step % algorithm.eval_every == 0):
        _open_eval(turn)
    elif last:
        _end(turn, "done", None)
    else:
        _open_step(turn)
