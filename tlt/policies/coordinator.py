"""One job's steps: decide(state, event, now) -> (state, commands). Nobody else changes its state.

A step is a round of rollouts, then an update that takes the policy from one version to the next.
Delivery may repeat or reorder events: what is out of place changes nothing.
"""

from typing import TypeVar, assert_never

import msgspec

from tlt.config import JobSpec
from tlt.messages import (
    CheckpointCommitted,
    CloseJob,
    DrafterLearned,
    DrafterPreempted,
    DrafterRefused,
    DrafterSpoiled,
    DrafterTrained,
    FinishRun,
    ForgetRollouts,
    GiveUpSpeculation,
    IssuePrompts,
    JobCancelRequested,
    JobStarted,
    KeepBest,
    KeepRollout,
    LearnFinished,
    OpenJob,
    PolicyPublished,
    PolicyRef,
    RecordRound,
    ReleaseBlobs,
    ReplaceRanks,
    RequeuePrompts,
    RolloutDropped,
    RolloutFinished,
    RolloutScored,
    RunCommand,
    RunEvent,
    SessionResumed,
    SpeculationStopped,
    StartRollout,
    StopSpeculation,
    StrategyChosen,
    WorkerFailed,
    WorkerIdled,
    WorkerInfo,
    WorkerJoined,
    WorkerLost,
)
from tlt.policies import lessons, rounds, saved, training
from tlt.policies.keyed import permuted
from tlt.policies.rounds import Round
from tlt.policies.run_state import DUTIES, Best, Draft, Duty, Phase, RunState, WorkerState
from tlt.types import (
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


def new_run(job: JobId, spec: JobSpec) -> RunState:
    return RunState(job=job, epoch=Epoch(0), spec=spec, train_prompts=0, eval_prompts=0)


def decide(state: RunState, event: RunEvent, now: float) -> tuple[RunState, list[RunCommand]]:
    if state.phase is Phase.ENDED:
        return state, []
    draft = Draft(state, now)
    match event:
        case JobStarted():
            _start(draft, event)
        case JobCancelRequested():
            _end(draft, "cancelled", None)
        case SessionResumed():
            _resume(draft, event)
        case WorkerJoined():
            _join(draft, event.info)
        case WorkerLost():
            _lose(draft, event)
        case WorkerFailed():
            if _is_current(state, event):
                _end(draft, "failed", event.error)
        case RolloutFinished() | RolloutScored() | RolloutDropped():
            _settle(draft, event)
        case WorkerIdled():
            _idle(draft, event)
        case LearnFinished():
            _learned(draft, event)
        case PolicyPublished():
            _publish(draft, event)
        case CheckpointCommitted():
            _checkpoint(draft, event)
        case DrafterLearned():
            lessons.learned(draft, event)
        case DrafterPreempted():
            _preempted(draft, event)
        case DrafterTrained():
            lessons.trained(draft, event)
        case DrafterSpoiled():
            lessons.spoiled(draft, event)
        case StrategyChosen():
            _weigh(draft, event)
        case SpeculationStopped() | DrafterRefused():
            pass
        case _:
            assert_never(event)
    return draft.state, draft.commands


_FromWorker = TypeVar(
    "_FromWorker", WorkerFailed, RolloutFinished, WorkerIdled, StrategyChosen, LearnFinished
)


def _is_current(state: RunState, event: _FromWorker) -> bool:
    """A worker whose incarnation is over is not heard any more."""
    worker = state.workers.get(event.worker)
    return worker is not None and worker.info.incarnation == event.incarnation


# --- the job ------------------------------------------------------------------------------------


def _start(draft: Draft, event: JobStarted) -> None:
    if draft.state.phase is not Phase.STARTING:
        return
    draft.set(
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
        _end(draft, "failed", complaint)
        return
    for info in event.workers:
        _join(draft, info)
    if algorithm.eval_every > 0:
        _open_eval(draft)
    else:
        _open_step(draft)


def _end(draft: Draft, status: JobStatus, error: str | None) -> None:
    state = draft.state
    draft.enter(Phase.ENDED)
    for worker in state.workers.values():
        draft.tell(
            CloseJob(worker=worker.info.worker, incarnation=worker.info.incarnation, job=state.job)
        )
    for policy in (state.policy, state.previous):
        _release(draft, policy)
    lessons.end(draft)
    draft.tell(FinishRun(job=state.job, status=status, error=error))


def _resume(draft: Draft, event: SessionResumed) -> None:
    """A new coordinator. The workers of the last session, if they are gone, are lost by name."""
    state = draft.state
    if event.epoch <= state.epoch:
        return
    draft.set(epoch=event.epoch)
    if event.blobs_kept:
        return
    lessons.blobs_lost(draft)
    if state.policy.weights is None:
        return
    saved = state.checkpoint
    kept = PolicyRef(version=PolicyVersion(0), weights=None)
    if saved is not None:
        kept = PolicyRef(version=saved.version, weights=saved.weights)
    draft.set(policy=kept, previous=None)
    if _is_published(draft.state):
        return
    # The weights are gone, but what made them is not: updates since the checkpoint run again.
    if state.phase is not Phase.LEARNING:
        draft.enter(Phase.LEARNING)
        lessons.preempt_all(draft)
    _abandon_attempt(draft, "the published weights were lost")
    _learn(draft)


# --- rounds -------------------------------------------------------------------------------------


def _open_step(draft: Draft) -> None:
    state = draft.state
    size = state.spec.algorithm.prompts_per_step
    per_epoch = state.train_prompts // size
    epoch, place = divmod(state.step, per_epoch)
    prompts = tuple(
        PromptIndex(permuted(place * size + i, state.train_prompts, state.spec.seed, epoch))
        for i in range(size)
    )
    draft.enter(Phase.ROLLING)
    _open_round(draft, "train", prompts, state.spec.algorithm.group_size)


def _open_eval(draft: Draft) -> None:
    draft.enter(Phase.EVALUATING)
    prompts = tuple(PromptIndex(i) for i in range(draft.state.eval_prompts))
    _open_round(draft, "eval", prompts, 1)


def _open_round(
    draft: Draft, purpose: Purpose, prompts: tuple[PromptIndex, ...], members: int
) -> None:
    state = draft.state
    opened = rounds.open_round(state.step, purpose, prompts, members)
    draft.set(round=opened, round_began=draft.now)
    draft.tell(
        IssuePrompts(
            job=state.job,
            epoch=state.epoch,
            step=state.step,
            purpose=purpose,
            prompts=prompts,
            members=members,
        )
    )
    _roll_everybody(draft)


def _roll_everybody(draft: Draft) -> None:
    for worker in draft.state.workers:
        _roll(draft, worker)


def _roll(draft: Draft, worker: WorkerId) -> None:
    state, current = draft.state, draft.state.workers[worker]
    if state.round is None:
        return
    if Duty.ROLLOUT not in DUTIES[current.duty]:
        # who trains the drafter rolls when it has stopped
        lessons.preempt(draft, worker)
        return
    draft.assign(worker, Duty.ROLLOUT)
    draft.tell(
        StartRollout(
            worker=worker,
            incarnation=current.info.incarnation,
            job=state.job,
            epoch=state.epoch,
            step=state.round.step,
            purpose=state.round.purpose,
            policy=state.policy,
            drafter=state.schooling.used,
            requeues=state.round.requeues,
        )
    )


def _settle(draft: Draft, event: RolloutFinished | RolloutScored | RolloutDropped) -> None:
    state = draft.state
    if state.round is None or not rounds.is_about(state.round, event):
        return
    if isinstance(event, RolloutFinished) and not _is_current(state, event):
        return
    after, changed = rounds.settle(state.round, event)
    if not changed:
        return
    draft.set(round=after)
    if isinstance(event, RolloutFinished) and event.purpose == "train":
        draft.tell(
            KeepRollout(job=state.job, step=event.step, prompt=event.prompt, member=event.member)
        )
    if after.settled and state.phase in (Phase.ROLLING, Phase.EVALUATING):
        _close_round(draft)
    elif isinstance(event, RolloutFinished) and event.purpose == "train":
        lessons.look_again(draft)


def _close_round(draft: Draft) -> None:
    state = draft.state
    assert state.round is not None
    draft.set(round=None)
    draft.tell(
        RecordRound(
            job=state.job,
            step=state.round.step,
            purpose=state.round.purpose,
            version=state.version,
            rewards=tuple(state.round.rewards()),
        )
    )
    if state.round.purpose == "eval":
        _judge(draft, state.round)
        if state.step >= state.spec.algorithm.steps:
            _end(draft, "done", None)
        else:
            _open_step(draft)
        return
    plan = training.plan(state.round, state.spec)
    draft.set(
        plans={**state.plans, state.version: plan},
        target=PolicyVersion(state.version + 1),
        rolled_seconds=draft.now - state.round_began,
    )
    if lessons.buy(draft):
        draft.enter(Phase.DRAFTING)
    else:
        _enter_learning(draft)


def _enter_learning(draft: Draft) -> None:
    draft.enter(Phase.LEARNING)
    lessons.preempt_all(draft)
    _learn(draft)


def _preempted(draft: Draft, event: DrafterPreempted) -> None:
    known = draft.state.workers.get(event.worker)
    merges = lessons.is_merging(draft.state, event.worker)
    if known is None or not lessons.preempted(draft, event):
        return
    opened = draft.state.round
    if draft.state.phase not in (Phase.ROLLING, Phase.EVALUATING) or opened is None:
        _learn_if_due(draft)
    elif known.looked != (opened.step, opened.purpose, opened.requeues):
        _roll(draft, event.worker)
    elif merges:
        # only because it did not: others may, or itself
        lessons.begin_if_worth(draft, event.worker)


def _judge(draft: Draft, done: Round) -> None:
    """Keep the policy that scored best so far."""
    state, rewards = draft.state, done.rewards()
    if not rewards:
        return
    mean = sum(rewards) / len(rewards)
    if state.best is not None and mean <= state.best.mean:
        return
    draft.set(best=Best(version=state.version, mean=mean))
    if state.spec.algorithm.keep_best and state.policy.weights is not None:
        draft.tell(KeepBest(job=state.job, policy=state.policy, mean=mean))


def _idle(draft: Draft, event: WorkerIdled) -> None:
    state = draft.state
    if not _is_current(state, event) or state.round is None:
        return
    looked = (event.step, event.purpose, event.requeues)
    # Where entries went back to the queue since, it has been told to look again.
    if looked != (state.round.step, state.round.purpose, state.round.requeues):
        return
    if state.workers[event.worker].duty is Duty.ROLLOUT:
        draft.assign(event.worker, Duty.IDLE, looked=looked)
        lessons.begin_if_worth(draft, event.worker)


# --- speculation --------------------------------------------------------------------------------


def _weigh(draft: Draft, event: StrategyChosen) -> None:
    """What it saves is added up; where it costs more, nobody speculates any longer."""
    state = draft.state
    if not state.speculates or not _is_current(state, event):
        return
    worker = state.workers[event.worker]
    if event.serial <= worker.tallied.get(event.rank, 0):
        return
    heard = msgspec.structs.replace(worker, tallied={**worker.tallied, event.rank: event.serial})
    spending = saved.spend(state.spending, event.tallies)
    draft.set(workers={**state.workers, event.worker: heard}, spending=spending)
    lost = saved.loss(spending)
    if lost is not None and lost.low is not None and lost.high is not None:
        draft.set(speculates=False)
        draft.tell(
            GiveUpSpeculation(job=state.job, saved=lost.seconds, low=lost.low, high=lost.high)
        )
        for known in state.workers.values():
            _stop_speculation(draft, known.info)
        lessons.preempt_all(draft)


def _stop_speculation(draft: Draft, info: WorkerInfo) -> None:
    draft.tell(
        StopSpeculation(worker=info.worker, incarnation=info.incarnation, job=draft.state.job)
    )


# --- workers ------------------------------------------------------------------------------------


def _join(draft: Draft, info: WorkerInfo) -> None:
    state = draft.state
    if info.incarnation <= state.newest.get(info.worker, -1):
        return
    known = state.workers.get(info.worker)
    if known is not None:
        _drop_worker(draft, known.info)
        if _too_many_losses(draft, known, f"{info.worker} started again"):
            return
    elif info.worker in state.newest:
        _requeue(draft, state.newest[info.worker])
    draft.set(
        newest={**state.newest, info.worker: info.incarnation},
        workers={**draft.state.workers, info.worker: WorkerState(info=info)},
        returning=draft.state.returning - {info.worker},
    )
    draft.tell(
        OpenJob(
            worker=info.worker,
            incarnation=info.incarnation,
            job=state.job,
            epoch=state.epoch,
            spec=state.spec,
            folder=state.folder,
        )
    )
    if not state.speculates:
        _stop_speculation(draft, info)
    if draft.state.phase in (Phase.ROLLING, Phase.EVALUATING):
        _roll(draft, info.worker)
    else:
        _learn_if_due(draft)


def _lose(draft: Draft, event: WorkerLost) -> None:
    state = draft.state
    newest = state.newest.get(event.worker)
    if newest is not None and event.incarnation < newest:
        return
    draft.set(newest={**state.newest, event.worker: event.incarnation})
    known = state.workers.get(event.worker)
    if known is None:
        never_joined = newest != event.incarnation
        if never_joined and newest is not None:
            _requeue(draft, newest)
        if never_joined or not event.returning:
            draft.set(returning=draft.state.returning - {event.worker})
            _learn_if_due(draft)
        return
    _drop_worker(draft, known.info)
    if event.returning:
        draft.set(returning=draft.state.returning | {event.worker})
    if event.with_session or not _too_many_losses(draft, known, event.reason):
        _learn_if_due(draft)


def _too_many_losses(draft: Draft, lost: WorkerState, reason: str) -> bool:
    """Count one, and fail the job past its limit. Ranks that we told to leave are no loss."""
    if lost.duty is Duty.LEAVING:
        return False
    losses, limit = draft.state.losses + 1, draft.state.spec.workers.max_restarts
    draft.set(losses=losses)
    if losses > limit:
        complaint = (
            f"worker {lost.info.worker} was lost, loss number {losses} of this job "
            f"(workers.max_restarts is {limit}): {reason}"
        )
        _end(draft, "failed", complaint)
    return losses > limit


def _drop_worker(draft: Draft, info: WorkerInfo) -> None:
    """Forget an incarnation."""
    state = draft.state
    known = state.workers[info.worker]
    draft.set(workers={k: v for k, v in state.workers.items() if k != info.worker})
    lessons.lost(draft, known)
    _requeue(draft, info.incarnation)
    if state.phase is Phase.LEARNING and known.duty is Duty.LEARN:
        _abandon_attempt(draft, f"{info.worker} was lost during the update")


def _requeue(draft: Draft, incarnation: Incarnation) -> None:
    """What it held goes back to the queue, and idle workers look again.

    Said again when its worker is next heard of: one that outlived its lease may have taken more.
    """
    state = draft.state
    draft.tell(RequeuePrompts(job=state.job, incarnation=incarnation))
    if state.round is None:
        return
    again = msgspec.structs.replace(state.round, requeues=state.round.requeues + 1)
    draft.set(round=again)
    if state.phase in (Phase.ROLLING, Phase.EVALUATING):
        _roll_everybody(draft)


# --- updates ------------------------------------------------------------------------------------


def _abandon_attempt(draft: Draft, reason: str) -> None:
    """A collective without one of its members: everybody who was in it starts fresh ranks.

    Once the version is out the update has happened: whoever lags is brought up to date by the
    next one.
    """
    state, saved = draft.state, draft.state.checkpoint
    if saved is not None and saved.version == state.target:
        _adopt(draft, PolicyRef(version=saved.version, weights=saved.weights))
    if _is_published(draft.state):
        return
    for worker, known in state.workers.items():
        ahead = known.trained > _restart_version(state)
        if known.duty is Duty.LEARN or (known.duty is not Duty.LEAVING and ahead):
            draft.assign(worker, Duty.LEAVING)
            draft.tell(
                ReplaceRanks(worker=worker, incarnation=known.info.incarnation, reason=reason)
            )
    draft.set(learn_attempt=state.learn_attempt + 1)


def _is_published(state: RunState) -> bool:
    return state.policy.version == state.target


def _restart_version(state: RunState) -> PolicyVersion:
    """Where a trainer without living members starts again."""
    return PolicyVersion(0) if state.checkpoint is None else state.checkpoint.version


def _learn_if_due(draft: Draft) -> None:
    if draft.state.phase is Phase.DRAFTING and not lessons.is_trained(draft.state):
        _enter_learning(draft)
    elif draft.state.phase is Phase.LEARNING:
        _learn(draft)


def _learn(draft: Draft) -> None:
    """Start the next update, unless one runs or somebody who will be back is awaited."""
    state = draft.state
    busy = (Duty.LEARN, Duty.LEAVING, Duty.DRAFT, Duty.PREEMPTING)
    waiting = any(worker.duty in busy for worker in state.workers.values())
    if waiting or state.returning or not state.workers:
        return
    if _is_published(state):
        _after_update(draft)
        return
    newest = max(worker.trained for worker in state.workers.values())
    if newest >= state.target:
        return  # trained, and about to be published
    restore = None
    if newest not in state.plans:
        restore = state.checkpoint
        newest = _restart_version(state)
    commands = training.learn_commands(
        job=state.job,
        epoch=state.epoch,
        spec=state.spec,
        attempt=state.learn_attempt,
        version=newest,
        plan=state.plans[newest],
        workers=[(w.info, w.trained) for w in state.workers.values()],
        restore=restore,
    )
    for command in commands:
        draft.assign(command.worker, Duty.LEARN)
        draft.tell(command)


def _learned(draft: Draft, event: LearnFinished) -> None:
    state = draft.state
    if not _is_current(state, event) or event.attempt != state.learn_attempt:
        return
    worker = state.workers[event.worker]
    if worker.duty is not Duty.LEARN or event.version <= worker.trained:
        return
    draft.assign(event.worker, Duty.IDLE, trained=event.version)
    _learn_if_due(draft)


def _publish(draft: Draft, event: PolicyPublished) -> None:
    state = draft.state
    awaited = state.phase is Phase.LEARNING and not _is_published(state)
    current = event.attempt == state.learn_attempt and event.policy.version == state.target
    if not awaited or not current:
        # a version that was passed on the way to a newer one, or that came too late
        following = state.plans.get(event.policy.version)
        if not awaited or following is None or following.samples:
            _release(draft, event.policy)  # else the next version has the same bytes
        return
    _adopt(draft, event.policy)
    _learn(draft)


def _adopt(draft: Draft, policy: PolicyRef) -> None:
    state = draft.state
    if policy.version > state.version:
        draft.set(previous=state.policy)
    draft.set(policy=policy, version=policy.version)
    if policy.version > state.version:
        _release(draft, state.previous)


def _release(draft: Draft, policy: PolicyRef | None) -> None:
    """Weights in a checkpoint stay; those in flight only are let go.

    An update without samples leaves the weights as they were: versions may share them.
    """
    state, saved = draft.state, draft.state.checkpoint
    if policy is None or policy.weights is None:
        return
    used = [] if saved is None else [saved.weights]
    if state.phase is not Phase.ENDED:
        used += [ref.weights for ref in (state.policy, state.previous) if ref is not None]
    if policy.weights not in used:
        draft.tell(ReleaseBlobs(job=state.job, blobs=(policy.weights,)))


def _after_update(draft: Draft) -> None:
    state = draft.state
    if state.round is not None:
        draft.enter(Phase.ROLLING if state.round.purpose == "train" else Phase.EVALUATING)
        if state.round.settled:
            _close_round(draft)
        else:
            _roll_everybody(draft)
        return
    step = Step(state.step + 1)
    draft.set(step=step)
    algorithm = state.spec.algorithm
    last = step >= algorithm.steps
    if algorithm.eval_every > 0 and (last or step % algorithm.eval_every == 0):
        _open_eval(draft)
    elif last:
        _end(draft, "done", None)
    else:
        _open_step(draft)


def _checkpoint(draft: Draft, event: CheckpointCommitted) -> None:
    state, saved = draft.state, event.checkpoint
    if event.attempt != state.learn_attempt:
        return
    if state.checkpoint is not None and saved.version <= state.checkpoint.version:
        return
    past = [version for version in state.plans if version < saved.version]
    draft.set(
        checkpoint=saved,
        plans={v: plan for v, plan in state.plans.items() if v not in past},
    )
    draft.tell(ForgetRollouts(job=state.job, steps=tuple(state.plans[v].step for v in past)))
