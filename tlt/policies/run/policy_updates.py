"""Choose samples for policy updates, make these, and keep the weights that they lead to.

A worker that lacks updates since the last checkpoint makes them again. The state keeps each
update's plan until a checkpoint holds a later version. Where the trainers hold shards of one copy,
all go back to the checkpoint as soon as one of them is new or gone.
"""

import math
from itertools import accumulate

from tlt.base.id_types import Attempt, Incarnation, Member, PolicyVersion, PromptIndex
from tlt.policies.algorithm.advantages import Advantages, Scored, compute_advantages
from tlt.policies.algorithm.sample_sharding import Sample, UpdatePlan, share_samples
from tlt.policies.run import blob_retention
from tlt.policies.run.rollout_batch import Answer, RolloutBatch
from tlt.policies.run.run_state import (
    Duty,
    Phase,
    RunState,
    Turn,
    WorkerState,
    current_worker,
    engines_on,
)
from tlt.protocol.commands import ReleaseBlobs, ReplaceRanks, UpdatePolicy
from tlt.protocol.events import CheckpointCommitted, PolicyPublished, PolicyUpdateFinished
from tlt.protocol.refs import Checkpoint, PolicyRef
from tlt.spec.config import AlgorithmSpec, JobSpec

# --- an update ----------------------------------------------------------------------------------


def is_waiting(state: RunState) -> bool:
    """Return True if an update must wait for workers that are busy or will be back."""
    busy = (Duty.POLICY_UPDATE, Duty.RESTARTING, Duty.DRAFTER_TRAINING, Duty.STOPPING)
    return engines_on(state, busy) > 0 or bool(state.returning_workers) or not state.workers


def is_published(state: RunState) -> bool:
    return state.policy.current.version == state.policy.target_version


def start_update(turn: Turn) -> None:
    """Start the next update towards the target on all workers, unless only publishing remains."""
    state = turn.state
    newest = max(worker.trainer_version for worker in state.workers.values())
    if newest >= state.policy.target_version:
        return
    restore, incomplete = None, _lacks_shards(state, newest)
    if incomplete or newest not in state.policy.plans:
        restore, newest = state.policy.checkpoint, _restart_version(state)
    if incomplete:
        turn.set_policy(
            shard_holders=_incarnations(state), update_attempt=state.policy.update_attempt + 1
        )
    for command in _update_commands(turn.state, newest, restore, reload=incomplete):
        held = {"trainer_version": newest} if incomplete else {}
        turn.assign(command.worker, Duty.POLICY_UPDATE, **held)
        turn.emit(command)


def _lacks_shards(state: RunState, newest: PolicyVersion) -> bool:
    """Return True if the trainers split one copy of the newest version and lack a part of it."""
    if state.spec.algorithm.shards == 1:
        return False
    held = all(worker.trainer_version == newest for worker in state.workers.values())
    return not held or state.policy.shard_holders != _incarnations(state)


def _incarnations(state: RunState) -> tuple[Incarnation, ...]:
    return tuple(worker.info.incarnation for worker in state.workers.values())


def _update_commands(
    state: RunState, version: PolicyVersion, restore: Checkpoint | None, reload: bool
) -> list[UpdatePolicy]:
    workers, plan, algorithm = (
        list(state.workers.values()),
        state.policy.plans[version],
        state.spec.algorithm,
    )
    sizes = [worker.info.ranks for worker in workers]
    parts = share_samples(
        plan.samples,
        plan.silent,
        sizes,
        count_minibatches(plan, algorithm),
        state.spec.seed,
        plan.step,
    )
    first_ranks = list(accumulate(sizes[:-1], initial=0))
    holders = [
        first
        for first, worker in zip(first_ranks, workers, strict=True)
        if worker.trainer_version == version
    ]
    in_step = reload or restore is not None or len(holders) == len(workers)
    reached = version + 1
    return [
        UpdatePolicy(
            worker=worker.info.worker,
            incarnation=worker.info.incarnation,
            job=state.job,
            epoch=state.epoch,
            step=plan.step,
            attempt=Attempt(state.policy.update_attempt),
            version=version,
            rendezvous=workers[0].info.rendezvous,
            group=f"{state.job}/{state.epoch}/{state.policy.update_attempt}/{version}",
            world=sum(sizes),
            first_rank=first_ranks[i],
            restore=restore,
            reload=reload,
            sync_from=None if in_step else holders[0],
            minibatches=parts[i],
            checkpoint=reached % algorithm.checkpoint_every == 0 or reached == algorithm.steps,
        )
        for i, worker in enumerate(workers)
    ]


def is_new_report(state: RunState, event: PolicyUpdateFinished) -> bool:
    """Return True if a worker reports its part of the running attempt for the first time."""
    worker = current_worker(state, event.worker, event.incarnation)
    return (
        worker is not None
        and event.attempt == state.policy.update_attempt
        and worker.duty is Duty.POLICY_UPDATE
        and event.version > worker.trainer_version
    )


def finish_part(turn: Turn, event: PolicyUpdateFinished) -> None:
    turn.assign(event.worker, Duty.IDLE, trainer_version=event.version)


def abandon_update(turn: Turn, reason: str) -> None:
    """Replace the ranks of all workers in a collective that lost one of its ranks.

    Once the version is committed the update has happened: a worker that lacks it gets it in the
    next update.
    """
    state, saved = turn.state, turn.state.policy.checkpoint
    if saved is not None and saved.version == state.policy.target_version:
        adopt_policy(turn, saved.policy)
    if is_published(turn.state):
        return
    for worker, known in state.workers.items():
        if known.duty is Duty.POLICY_UPDATE or _must_go_back(state, known):
            turn.assign(worker, Duty.RESTARTING)
            turn.emit(
                ReplaceRanks(worker=worker, incarnation=known.info.incarnation, reason=reason)
            )
    turn.set_policy(update_attempt=state.policy.update_attempt + 1)


def _must_go_back(state: RunState, worker: WorkerState) -> bool:
    """Return True if the trainer holds a version that the next attempt doesn't start from."""
    return worker.duty is not Duty.RESTARTING and worker.trainer_version > _restart_version(state)


def _restart_version(state: RunState) -> PolicyVersion:
    """Return the version where trainers without the newest weights start again."""
    return PolicyVersion(0) if state.policy.checkpoint is None else state.policy.checkpoint.version


# --- weights ------------------------------------------------------------------------------------


def is_awaited(state: RunState, event: PolicyPublished) -> bool:
    return (
        _awaits_version(state)
        and event.attempt == state.policy.update_attempt
        and event.policy.version == state.policy.target_version
    )


def _awaits_version(state: RunState) -> bool:
    return state.phase is Phase.POLICY_UPDATE and not is_published(state)


def release_passed(turn: Turn, event: PolicyPublished) -> None:
    """Free a version that arrived too late or that a newer one has replaced.

    A version followed by an update without samples stays: the next version has the same bytes.
    """
    following = turn.state.policy.plans.get(event.policy.version)
    if not _awaits_version(turn.state) or following is None or following.samples:
        _release(turn, event.policy)


def adopt_policy(turn: Turn, policy: PolicyRef) -> None:
    state = turn.state
    # after a return to a checkpoint, a version of the same number may have been current before
    follows = policy.version > state.policy.current.version
    if follows:
        turn.set_policy(previous=state.policy.current)
    turn.set_policy(current=policy, version=policy.version)
    if follows and state.policy.previous is not None:
        _release(turn, state.policy.previous)
        # the checkpoint that held it is no longer the newest
        blob_retention.discard(turn, *state.policy.previous.blobs)


def record_checkpoint(turn: Turn, event: CheckpointCommitted) -> None:
    state, saved, before = turn.state, event.checkpoint, turn.state.policy.checkpoint
    if event.attempt != state.policy.update_attempt:
        return
    if before is not None and saved.version <= before.version:
        return
    plans = {v: plan for v, plan in state.policy.plans.items() if v >= saved.version}
    turn.set_policy(checkpoint=saved, plans=plans)
    if before is not None:
        blob_retention.discard(turn, *before.blobs)


def return_to_checkpoint(turn: Turn) -> None:
    """Use the last checkpoint's policy after blobs in flight were lost.

    The later weights are gone, but the plans of their updates remain, so they can be made again.
    """
    state, saved = turn.state, turn.state.policy.checkpoint
    if state.policy.current.weights is None:
        return
    first = PolicyRef(version=PolicyVersion(0), weights=None)
    kept = first if saved is None else saved.policy
    # the checkpoint's event may have come before the one that publishes its policy
    turn.set_policy(current=kept, previous=None, version=max(state.policy.version, kept.version))
    for policy in (state.policy.current, state.policy.previous):
        if policy is not None:
            blob_retention.discard(turn, *policy.blobs)  # in an older checkpoint


def end(turn: Turn) -> None:
    """Free the weights that a job leaves in shared memory when it ends."""
    state = turn.state
    for policy in (state.policy.current, state.policy.previous):
        _release(turn, policy)
    if state.policy.previous is not None:
        turn.set_policy(previous=None)
        blob_retention.discard(turn, *state.policy.previous.blobs)


def _release(turn: Turn, policy: PolicyRef | None) -> None:
    """Free weights that are only in shared memory; those in a checkpoint stay.

    An update without samples leaves the weights as they were, so versions may share them.
    """
    state, saved = turn.state, turn.state.policy.checkpoint
    if policy is None:
        return
    used = [] if saved is None else [*saved.blobs]
    if state.phase is not Phase.ENDED:
        kept = (state.policy.current, state.policy.previous)
        used += [blob for ref in kept if ref is not None for blob in ref.blobs]
    if unused := tuple(blob for blob in policy.blobs if blob not in used):
        turn.emit(ReleaseBlobs(job=state.job, blobs=unused))


def plan_update(batch: RolloutBatch, spec: JobSpec) -> UpdatePlan:
    """Leave out answers without a reward, and if the spec says so those that were cut off.

    Answers without advantages, as in a group in which all scored the same, are learned from only
    if a penalty or a bonus beside the reward is. With dynamic sampling groups that agree are left
    out, and don't count in the averages: others took their place.
    """
    algorithm = spec.algorithm
    groups = [
        (prompt, group.scored())
        for prompt, group in sorted(batch.groups.items())
        if not (algorithm.dynamic_sampling and group.agrees)
    ]
    advantages = _advantages([kept for _, kept in groups], algorithm)
    samples: list[Sample] = []
    silent: list[Sample] = []
    for (prompt, kept), of_group in zip(groups, advantages, strict=True):
        teaches = of_group is not None or algorithm.learns_without_advantage
        part = samples if teaches else silent
        for each, advantage in zip(kept, of_group or [0.0] * len(kept), strict=True):
            if not (each[1].truncated and algorithm.mask_truncated):
                part.append(_sample(prompt, each, advantage))
    if not samples:
        silent.clear()
    return UpdatePlan(step=batch.step, samples=tuple(samples), silent=tuple(silent))


_Scored = tuple[Member, Answer, float]


def _advantages(groups: list[list[_Scored]], algorithm: AlgorithmSpec) -> Advantages:
    if algorithm.advantages_in_update:
        return [None for _ in groups]
    return compute_advantages(
        [[Scored(reward, answer.length) for _, answer, reward in kept] for kept in groups],
        algorithm.advantage,
        algorithm.normalise_advantage,
    )


def _sample(prompt: PromptIndex, scored: _Scored, advantage: float) -> Sample:
    member, answer, reward = scored
    assert answer.ref is not None, "an answer that has a score has finished"
    return Sample(
        prompt=prompt,
        member=member,
        reward=reward,
        advantage=advantage,
        length=answer.length,
        answer=answer.ref,
        prompt_length=answer.prompt_length,
    )


def count_minibatches(plan: UpdatePlan, algorithm: AlgorithmSpec) -> int:
    """Keep the size of minibatches where dynamic sampling found too few groups.

    Without dynamic sampling the silent samples keep it.
    """
    if not algorithm.dynamic_sampling:
        return algorithm.minibatches
    groups = len({sample.prompt for sample in plan.samples})
    return max(1, math.ceil(algorithm.minibatches * groups / algorithm.prompts_per_step))
