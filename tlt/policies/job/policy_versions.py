"""The updates that take the policy from one version to the next, and the weights that come of them.

Whoever lacks updates since the last checkpoint makes them again: what made each of them is kept in
the state until a checkpoint is past it.
"""

from tlt.ids import PolicyVersion
from tlt.policies.job import blob_retention, update_plan
from tlt.policies.job.run_state import Duty, Phase, RunState, Turn
from tlt.protocol.commands import ForgetRollouts, ReleaseBlobs, ReplaceRanks
from tlt.protocol.events import CheckpointCommitted, PolicyPublished, PolicyUpdateFinished
from tlt.protocol.refs import PolicyRef


def proceed(turn: Turn) -> bool:
    """Start the next update, unless one runs or somebody who will be back is awaited.

    True where none is left to make: the version is out, and everybody is free.
    """
    state = turn.state
    busy = (Duty.POLICY_UPDATE, Duty.LEAVING, Duty.DRAFTER_TRAINING, Duty.STOPPING)
    waiting = any(worker.duty in busy for worker in state.workers.values())
    if waiting or state.returning_workers or not state.workers:
        return False
    if _is_published(state):
        return True
    newest = max(worker.trainer_version for worker in state.workers.values())
    if newest >= state.target:
        return False  # trained, and about to be published
    restore = None
    if newest not in state.plans:
        restore = state.checkpoint
        newest = _restart_version(state)
    commands = update_plan.learn_commands(
        job=state.job,
        epoch=state.epoch,
        spec=state.spec,
        attempt=state.update_attempt,
        version=newest,
        plan=state.plans[newest],
        workers=[(w.info, w.trainer_version) for w in state.workers.values()],
        restore=restore,
    )
    for command in commands:
        turn.assign(command.worker, Duty.POLICY_UPDATE)
        turn.tell(command)
    return False


def learned(turn: Turn, event: PolicyUpdateFinished) -> bool:
    """Whether the worker, whose incarnation is not over, is free again."""
    worker = turn.state.workers[event.worker]
    if event.attempt != turn.state.update_attempt:
        return False
    if worker.duty is not Duty.POLICY_UPDATE or event.version <= worker.trainer_version:
        return False
    turn.assign(event.worker, Duty.IDLE, trainer_version=event.version)
    return True


def published(turn: Turn, event: PolicyPublished) -> bool:
    """Whether it is the version that was awaited."""
    state = turn.state
    awaited = state.phase is Phase.POLICY_UPDATE and not _is_published(state)
    current = event.attempt == state.update_attempt and event.policy.version == state.target
    if awaited and current:
        _adopt(turn, event.policy)
        return True
    # a version that was passed on the way to a newer one, or that came too late
    following = state.plans.get(event.policy.version)
    if not awaited or following is None or following.samples:
        _release(turn, event.policy)  # else the next version has the same bytes
    return False


def checkpoint(turn: Turn, event: CheckpointCommitted) -> None:
    state, saved = turn.state, event.checkpoint
    if event.attempt != state.update_attempt:
        return
    if state.checkpoint is not None and saved.version <= state.checkpoint.version:
        return
    before = state.checkpoint
    past = [version for version in state.plans if version < saved.version]
    turn.set(
        checkpoint=saved,
        plans={v: plan for v, plan in state.plans.items() if v not in past},
    )
    turn.tell(ForgetRollouts(job=state.job, steps=tuple(state.plans[v].step for v in past)))
    if before is not None:
        blob_retention.discard(turn, before.weights, before.optimiser)


def abandon(turn: Turn, reason: str) -> None:
    """A collective without one of its members: everybody who was in it starts fresh ranks.

    Once the version is out the update has happened: whoever lags is brought up to date by the
    next one.
    """
    state, saved = turn.state, turn.state.checkpoint
    if saved is not None and saved.version == state.target:
        _adopt(turn, PolicyRef(version=saved.version, weights=saved.weights))
    if _is_published(turn.state):
        return
    for worker, known in state.workers.items():
        ahead = known.trainer_version > _restart_version(state)
        if known.duty is Duty.POLICY_UPDATE or (known.duty is not Duty.LEAVING and ahead):
            turn.assign(worker, Duty.LEAVING)
            turn.tell(
                ReplaceRanks(worker=worker, incarnation=known.info.incarnation, reason=reason)
            )
    turn.set(update_attempt=state.update_attempt + 1)


def blobs_lost(turn: Turn) -> bool:
    """Rollouts are back at the last checkpoint. Whether an update has to be made, or made again.

    The weights are gone, but what made them is not. Those of an update that runs may be, too.
    """
    state, saved = turn.state, turn.state.checkpoint
    if state.policy.weights is not None:
        kept = PolicyRef(version=PolicyVersion(0), weights=None)
        if saved is not None:
            kept = PolicyRef(version=saved.version, weights=saved.weights)
        # a checkpoint may have been heard of, and the policy in it not yet
        turn.set(policy=kept, previous_policy=None, version=max(state.version, kept.version))
        for policy in (state.policy, state.previous_policy):
            if policy is not None and policy.weights is not None:
                blob_retention.discard(turn, policy.weights)  # those of an older checkpoint
    return not _is_published(turn.state)


def end(turn: Turn) -> None:
    """Of a job that has ended: what was in flight is let go."""
    state = turn.state
    for policy in (state.policy, state.previous_policy):
        _release(turn, policy)
    if state.previous_policy is not None:
        turn.set(previous_policy=None)
        blob_retention.discard(turn, state.previous_policy.weights)


def _is_published(state: RunState) -> bool:
    return state.policy.version == state.target


def _restart_version(state: RunState) -> PolicyVersion:
    """Where a trainer without living members starts again."""
    return PolicyVersion(0) if state.checkpoint is None else state.checkpoint.version


def _adopt(turn: Turn, policy: PolicyRef) -> None:
    state = turn.state
    if policy.version > state.version:
        turn.set(previous_policy=state.policy)
    turn.set(policy=policy, version=policy.version)
    if policy.version > state.version and state.previous_policy is not None:
        _release(turn, state.previous_policy)
        # it was in a checkpoint, and there is a newer one
        blob_retention.discard(turn, state.previous_policy.weights)


def _release(turn: Turn, policy: PolicyRef | None) -> None:
    """Weights in a checkpoint stay; those in flight only are let go.

    An update without samples leaves the weights as they were: versions may share them.
    """
    state, saved = turn.state, turn.state.checkpoint
    if policy is None or policy.weights is None:
        return
    used = [] if saved is None else [saved.weights]
    if state.phase is not Phase.ENDED:
        used += [ref.weights for ref in (state.policy, state.previous_policy) if ref is not None]
    if policy.weights not in used:
        turn.tell(ReleaseBlobs(job=state.job, blobs=(policy.weights,)))
