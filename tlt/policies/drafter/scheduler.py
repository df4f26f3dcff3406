"""Decide which workers train the drafter, and from when until when.

Idle workers train if the gate finds that it pays, and stop the moment they are needed. Between a
rollout batch and the policy update all workers may train for a reserved time.
"""

from collections.abc import Sequence

import msgspec

from tlt.ids import NAMED, PromptIndex, WorkerId
from tlt.policies.drafter import (
    adoption,
    gate,
    lineage,
    payoff_evidence,
    speedup_model,
    training_progress,
    training_sessions,
    version_changes,
)
from tlt.policies.drafter.data_selection import choose_held_out
from tlt.policies.drafter.live_acceptance import find_regression
from tlt.policies.job.rollout_batch import RolloutBatch
from tlt.policies.job.run_state import Duty, Phase, RunState, Turn, WorkerState, current_worker
from tlt.protocol.events import (
    DrafterCommitFailed,
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterRefused,
)
from tlt.protocol.records import StrategyTally
from tlt.protocol.refs import DrafterRef

# deltas of each rank of a member that was asked to merge, before the member is stopped
_DELTAS_INSTEAD_OF_MERGE = 16


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Time before the policy update for which these workers train the drafter."""

    verdict: gate.Verdict
    workers: tuple[WorkerId, ...]


def _is_wanted(state: RunState) -> bool:
    return state.spec.drafter.train != "off" and state.speculation_allowed


# --- idle workers -------------------------------------------------------------------------------


def start_if_worth(turn: Turn, worker: WorkerId) -> None:
    """Let an idle worker train if that pays."""
    state = turn.state
    if not _is_wanted(state) or not training_sessions.is_eligible(state, state.workers[worker]):
        return
    verdict = _judge_idle_training(turn)
    if not training_sessions.is_any_open(state):
        version_changes.explain(turn, "train" if verdict.worth else "rest", verdict)
    if verdict.worth:
        training_sessions.start(turn, worker)


def start_idle_workers(turn: Turn) -> None:
    """Let idle workers train on an answer that has just finished."""
    state = turn.state
    if not _is_wanted(state) or state.phase not in (Phase.ROLLOUT, Phase.EVALUATING):
        return
    idle = [
        worker
        for worker, known in state.workers.items()
        if known.duty is Duty.IDLE and training_sessions.is_eligible(state, known)
    ]
    if idle and _judge_idle_training(turn).worth:
        for worker in idle:
            training_sessions.start(turn, worker)


def _judge_idle_training(turn: Turn) -> gate.Verdict:
    state = turn.state
    return gate.judge_idle_training(state.spec, state.drafter.evidence, _outlook(turn))


def _outlook(turn: Turn) -> gate.TrainingOutlook:
    state, progress = turn.state, turn.state.drafter.progress
    seconds = state.rollout_seconds
    if not seconds and state.batch is not None:
        # the first batch takes at least as long as it has already
        seconds = state.batch.longest_decode_seconds or turn.now - state.batch_opened_at
    opened = state.phase is not Phase.EVALUATING
    measured = state.drafter.evidence.speedup_without_drafter
    return gate.TrainingOutlook(
        step=state.step,
        newest_step=progress.newest_step,
        steps=max(0, state.spec.algorithm.steps - state.step - opened),
        rollout_seconds=max(0.0, seconds),
        members=sum(worker.info.ranks for worker in state.workers.values()),
        micro_batches_per_second=progress.micro_batch_rate,
        speedup_without_drafter=measured
        or speedup_model.without_drafter(state.spec, state.decode_costs),
        learnable_micro_batches=progress.learnable_micro_batches,
        idle_micro_batches=progress.idle_micro_batches / max(1, state.step + 1),
    )


# --- a step's beginning and end -----------------------------------------------------------------


def open_step(turn: Turn, prompts: Sequence[PromptIndex]) -> None:
    """Hold out some of the step's prompts; those of the step before are still held out."""
    step, drafter = turn.state.step, turn.state.drafter
    before = {s: held for s, held in drafter.progress.held_out.items() if s == step - 1}
    held_out = {**before, step: choose_held_out(step, prompts)}
    turn.set_drafter(progress=msgspec.structs.replace(drafter.progress, held_out=held_out))
    if drafter.adoption.used is None:
        turn.set_drafter(evidence=payoff_evidence.refit_named(drafter.evidence))


def count_answers(turn: Turn, batch: RolloutBatch) -> None:
    """Count the tokens of a batch that drafters may train on."""
    progress = turn.state.drafter.progress
    held = progress.held_out.get(batch.step, ())
    tokens = sum(
        answer.length
        for prompt, group in batch.groups.items()
        if prompt not in held
        for answer in group.members
    )
    counted = msgspec.structs.replace(progress, answer_tokens=progress.answer_tokens + tokens)
    turn.set_drafter(progress=counted)


def plan_reservation(turn: Turn) -> Reservation | None:
    """Return the time that pays to train the drafter before the policy update, if any does."""
    state = turn.state
    if not _is_wanted(state) or not state.workers:
        return None
    verdict = gate.judge_reserved_time(state.spec, state.drafter.evidence, _outlook(turn))
    free = (Duty.IDLE, Duty.ROLLOUT, Duty.DRAFTER_TRAINING)
    workers = tuple(
        worker
        for worker, known in state.workers.items()
        if known.duty in free and training_sessions.is_eligible(state, known)
    )
    return Reservation(verdict=verdict, workers=workers) if verdict.worth and workers else None


def start_reserved_training(turn: Turn, reservation: Reservation) -> None:
    state = turn.state
    version_changes.explain(turn, "buy", reservation.verdict)
    ranks = sum(state.workers[worker].info.ranks for worker in reservation.workers)
    seconds = reservation.verdict.cost * ranks
    turn.set_drafter(
        progress=msgspec.structs.replace(state.drafter.progress, reserved_seconds=seconds)
    )
    for worker in reservation.workers:
        if state.workers[worker].duty is not Duty.DRAFTER_TRAINING:
            training_sessions.start(turn, worker)


# --- members ------------------------------------------------------------------------------------


def is_merging(state: RunState, worker: WorkerId) -> bool:
    merge = state.drafter.lineage.merge
    return merge is not None and merge.worker == worker


def end_session(turn: Turn, worker: WorkerState) -> None:
    turn.assign(worker.info.worker, Duty.IDLE)
    version_changes.cancel_merge(turn, worker.info.incarnation)


def lose_members(turn: Turn, worker: WorkerState) -> None:
    """Forget the ranks of a worker that is gone; the deltas they handed in stay."""
    version_changes.cancel_merge(turn, worker.info.incarnation)
    known = turn.state.drafter.lineage
    if not worker.members.isdisjoint(known.newest_delta):
        turn.set_drafter(lineage=lineage.remove_members(known, worker.members))


def add_delta(turn: Turn, event: DrafterDeltaReady) -> None:
    state, delta = turn.state, event.delta
    worker = current_worker(state, delta.worker, delta.incarnation)
    if worker is None:
        return
    if not lineage.is_new(state.drafter.lineage, delta):
        version_changes.release(turn, (delta.blob,))
        return
    after, unused = lineage.add_delta(state.drafter.lineage, delta)
    reserved = state.phase is Phase.RESERVED_TRAINING
    progress = training_progress.add_delta(state.drafter.progress, event, reserved)
    turn.set_drafter(lineage=after, progress=progress)
    version_changes.release(turn, unused)
    if worker.duty is Duty.DRAFTER_TRAINING:
        _merge_if_due(turn, worker)


def _merge_if_due(turn: Turn, worker: WorkerState) -> None:
    state, drafter = turn.state, turn.state.drafter
    if drafter.lineage.merge is not None:
        _await_merge(turn, drafter.lineage.merge, worker)
        return
    reserved = state.phase is Phase.RESERVED_TRAINING
    over = reserved and drafter.progress.reserved_seconds <= 0.0
    if over and not drafter.lineage.deltas:
        training_sessions.stop_all(turn)
    elif over or training_sessions.is_merge_due(state):
        training_sessions.request_merge(turn, worker)


def _await_merge(turn: Turn, merge: lineage.Merge, worker: WorkerState) -> None:
    """Stop a member that goes on handing in deltas instead of merging."""
    if worker.info.incarnation != merge.incarnation:
        return
    after = lineage.count_delta_since(turn.state.drafter.lineage, merge)
    turn.set_drafter(lineage=after)
    if merge.deltas_since + 1 >= _DELTAS_INSTEAD_OF_MERGE * worker.info.ranks:
        training_sessions.stop(turn, merge.worker)


def finish_merge(turn: Turn, event: DrafterMerged) -> None:
    worker = current_worker(turn.state, event.worker, event.incarnation)
    if worker is None:
        return
    if not training_sessions.is_eligible(turn.state, worker):
        # the worker evaluated against another drafter than the one in use
        version_changes.cancel_merge(turn, event.incarnation)
    if not lineage.is_awaited(turn.state.drafter.lineage, event):
        late = (event.base.weights, event.drafter.weights)
        version_changes.release(turn, (blob for blob in late if blob is not None))
        return
    version_changes.finish_merge(turn, event)
    _continue_or_stop(turn)


def _continue_or_stop(turn: Turn) -> None:
    """Send the merged base to all members, or stop them if training doesn't pay any longer."""
    state, drafter = turn.state, turn.state.drafter
    members = [w for w in state.workers.values() if w.duty is Duty.DRAFTER_TRAINING]
    if state.phase is Phase.RESERVED_TRAINING:
        verdict = gate.judge_reserved_time(state.spec, drafter.evidence, _outlook(turn))
        worth = drafter.progress.reserved_seconds > 0.0 and verdict.worth
    else:
        verdict = _judge_idle_training(turn)
        worth = verdict.worth
        if not worth and members:
            version_changes.explain(turn, "rest", verdict)
    for worker in members:
        if worth and state.speculation_allowed:
            training_sessions.redirect(turn, worker)
        else:
            training_sessions.stop(turn, worker.info.worker)


def restart_diverged(turn: Turn, event: DrafterDiverged) -> None:
    """Restart from the drafter in use, unless the base that diverged was replaced by now."""
    worker = current_worker(turn.state, event.worker, event.incarnation)
    if worker is None or not training_sessions.is_open(worker, event.training_session):
        return
    drafter = turn.state.drafter
    if event.base != drafter.lineage.base.version:
        return
    turn.set_drafter(evidence=payoff_evidence.record_failure(drafter.evidence, turn.state.step))
    version_changes.restart(turn, event.error)
    training_sessions.stop_all(turn)


def restart_lost(turn: Turn) -> None:
    """Restart after blobs in flight were lost; the drafter in use was committed."""
    drafter = turn.state.drafter
    restarted, _ = lineage.restart(drafter.lineage, drafter.adoption.used)
    turn.set_drafter(lineage=restarted)
    training_sessions.redirect_all(turn)


# --- the drafter in use -------------------------------------------------------------------------


def record_live_acceptance(turn: Turn, tallies: Sequence[StrategyTally]) -> None:
    """Return to the earlier drafter if rollouts show that the one in use is much worse."""
    if not _is_wanted(turn.state):
        return
    drafter = turn.state.drafter
    live = adoption.record_live(drafter.adoption, tallies)
    turn.set_drafter(adoption=live)
    if live.used is None:
        evidence = payoff_evidence.record_named_live(drafter.evidence, tallies)
        turn.set_drafter(evidence=evidence)
        return
    regression = find_regression(live.live, live.fallback_live)
    if regression is not None:
        now, before = regression
        why = f"accept length {now:.2f} in rollouts, {before:.2f} with the one before"
        _revert(turn, live.fallback, why)


def record_failed_commit(turn: Turn, event: DrafterCommitFailed) -> None:
    """Return to the previous drafter if the one in use isn't in the run's folder."""
    known = adoption.forget_uncommitted(turn.state.drafter.adoption, event.version)
    turn.set_drafter(adoption=known)
    if known.used is not None and known.used.version == event.version:
        why = f"version {event.version} could not be kept: {event.error}"
        _revert(turn, known.previous, why)
        _rest(turn)


def record_refusal(turn: Turn, event: DrafterRefused) -> None:
    """Return to the previous drafter if no worker can load the one in use."""
    state, known, version = turn.state, turn.state.drafter.adoption, event.version
    if current_worker(state, event.worker, event.incarnation) is None:
        return
    if version is not None and version in (NAMED, known.version_in_use):
        known = adoption.record_refusal(known, version, event.incarnation)
        turn.set_drafter(adoption=known)
    incarnations = [worker.info.incarnation for worker in state.workers.values()]
    in_use = known.used is not None and version == known.used.version
    if in_use and adoption.is_refused_by_all(known, incarnations):
        _revert(turn, known.previous, event.error)
        _rest(turn)
    else:
        training_sessions.stop_ineligible(turn)


def _revert(turn: Turn, drafter: DrafterRef | None, why: str) -> None:
    version_changes.revert(turn, drafter, why)
    training_sessions.redirect_all(turn)


def _rest(turn: Turn) -> None:
    evidence = payoff_evidence.rest_longest(turn.state.drafter.evidence, turn.state.step)
    turn.set_drafter(evidence=evidence)
