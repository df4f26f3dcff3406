"""Decide which workers train the drafter, and start and stop their training sessions.

Idle workers train if the gate finds that it pays, and stop when they are needed. Between a rollout
batch and the policy update all workers may train for a reserved time.
"""

from collections.abc import Sequence

import msgspec

from tlt.base.id_types import PromptIndex, WorkerId
from tlt.policies.drafter import payoff_evidence, speedup_model
from tlt.policies.drafter import training_payoff_gate as gate
from tlt.policies.drafter.data_selection import choose_held_out
from tlt.policies.drafter.used_and_fallback_drafters import lacks_drafter, refusers
from tlt.policies.run import adopt_reject_revert, drafter_merges
from tlt.policies.run.rollout_batch import RolloutBatch
from tlt.policies.run.run_state import (
    Duty,
    Phase,
    RunState,
    Turn,
    WorkerState,
    all_engines,
    count_engines,
    engines_on,
)
from tlt.protocol.commands import StopDrafterTraining, TrainDrafter

TRAINING = (Duty.DRAFTER_TRAINING, Duty.STOPPING)


def is_any_open(state: RunState) -> bool:
    return engines_on(state, TRAINING) > 0


def is_open(worker: WorkerState, session: int) -> bool:
    return worker.duty in TRAINING and worker.training_session == session


def is_eligible(state: RunState, worker: WorkerState) -> bool:
    """Return False for a worker without the drafter in use.

    It would train from other weights than the others, and evaluate against less.
    """
    incarnations = (known.info.incarnation for known in state.workers.values())
    return not lacks_drafter(state.drafter.adoption, worker.info.incarnation, incarnations)


def start(turn: Turn, worker: WorkerId) -> None:
    progress = turn.state.drafter.progress
    session = progress.sessions + 1
    turn.set_drafter(progress=msgspec.structs.replace(progress, sessions=session))
    turn.assign(worker, Duty.DRAFTER_TRAINING, training_session=session)
    _send_base(turn, turn.state.workers[worker])


def redirect_all(turn: Turn) -> None:
    """Send the new base to all members that could load the drafter in use, and stop the others."""
    stop_ineligible(turn)
    for worker in turn.state.workers.values():
        redirect(turn, worker)


def redirect(turn: Turn, worker: WorkerState) -> None:
    if worker.duty is Duty.DRAFTER_TRAINING:
        _send_base(turn, worker)


def _send_base(turn: Turn, worker: WorkerState) -> None:
    state = turn.state
    turn.emit(
        TrainDrafter(
            worker=worker.info.worker,
            incarnation=worker.info.incarnation,
            job=state.job,
            step=state.step,
            training_session=worker.training_session,
            base=state.drafter.lineage.base,
            members=_count_members(state),
            held_out=state.drafter.progress.held_out,
        )
    )


def _count_members(state: RunState) -> int:
    """Count the ranks in training; in reserved time all are, or begin at once."""
    if state.phase is Phase.RESERVED_TRAINING:
        return all_engines(state)
    return engines_on(state, (Duty.DRAFTER_TRAINING,))


def stop(turn: Turn, worker: WorkerId) -> None:
    current = turn.state.workers[worker]
    if current.duty is not Duty.DRAFTER_TRAINING:
        return
    turn.assign(worker, Duty.STOPPING)
    turn.emit(
        StopDrafterTraining(
            worker=worker,
            incarnation=current.info.incarnation,
            job=turn.state.job,
            training_session=current.training_session,
        )
    )


def stop_all(turn: Turn) -> None:
    for worker in turn.state.workers:
        stop(turn, worker)


def stop_ineligible(turn: Turn) -> None:
    if not refusers(turn.state.drafter.adoption):
        return
    for worker, known in turn.state.workers.items():
        if not is_eligible(turn.state, known):
            stop(turn, worker)


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Time before the policy update for which these workers train the drafter."""

    verdict: gate.Verdict
    workers: tuple[WorkerId, ...]


def is_wanted(state: RunState) -> bool:
    return state.spec.drafter.train != "off" and state.speculation_allowed


def may_train(turn: Turn) -> bool:
    """Return False if training in the batch to be opened is not expected to pay.

    Nothing is known before the first batch.
    """
    state = turn.state
    if not is_wanted(state):
        return False
    if not state.rollout_seconds:
        return True
    evidence, ahead = state.drafter.evidence, outlook(turn)
    return (
        gate.judge_idle_training(state.spec, evidence, ahead).worth
        or gate.judge_reserved_time(state.spec, evidence, ahead).worth
    )


def _start_and_merge_if_due(turn: Turn, worker: WorkerId) -> None:
    """Start a training session, and request a merge that is due."""
    start(turn, worker)
    drafter_merges.request_if_due(turn, turn.state.workers[worker])


# --- idle workers -------------------------------------------------------------------------------


def start_if_worth(turn: Turn, worker: WorkerId) -> None:
    """Let an idle worker train if that pays."""
    state = turn.state
    if not is_wanted(state) or not is_eligible(state, state.workers[worker]):
        return
    verdict = judge_idle_training(turn)
    _explain_if_changed(turn, verdict)
    if verdict.worth and _keeps_answers(state):
        _start_and_merge_if_due(turn, worker)


def _keeps_answers(state: RunState) -> bool:
    return state.batch is None or state.batch.keep_answers


def _explain_if_changed(turn: Turn, verdict: gate.Verdict) -> None:
    """Explain a decision once for all workers and steps that it holds for."""
    kind = "train" if verdict.worth else "wait"
    evidence, explained = turn.state.drafter.evidence, f"{kind}: {verdict.why}"
    if evidence.explained != explained:
        turn.set_drafter(evidence=msgspec.structs.replace(evidence, explained=explained))
        adopt_reject_revert.explain(turn, kind, verdict)


def start_idle_workers(turn: Turn) -> None:
    """Let idle workers train on an answer that has just finished."""
    state = turn.state
    if not is_wanted(state) or state.phase not in (Phase.ROLLOUT, Phase.EVALUATING):
        return
    if not _keeps_answers(state) or not engines_on(state, (Duty.IDLE,)):
        return
    idle = [known for known in state.workers.values() if known.duty is Duty.IDLE]
    idle = [known for known in idle if is_eligible(state, known)]
    if idle and judge_idle_training(turn).worth:
        for known in idle:
            _start_and_merge_if_due(turn, known.info.worker)


def judge_idle_training(turn: Turn) -> gate.Verdict:
    state = turn.state
    return gate.judge_idle_training(state.spec, state.drafter.evidence, outlook(turn))


def outlook(turn: Turn) -> gate.TrainingOutlook:
    state, progress = turn.state, turn.state.drafter.progress
    seconds, first_step = state.rollout_seconds, state.policy.initial_version
    if not seconds and state.batch is not None:
        # the first batch takes at least as long as it has taken already
        seconds = state.batch.longest_decode_seconds or turn.now - state.batch.opened_at
    opened = state.phase is not Phase.EVALUATING
    measured = state.drafter.evidence.speedup_without_drafter
    members = max(1, all_engines(state))
    return gate.TrainingOutlook(
        step=state.step,
        newest_step=progress.newest_step,
        steps=max(0, state.spec.algorithm.steps - state.step - opened),
        rollout_seconds=max(0.0, seconds),
        members=members,
        micro_batches_per_second=progress.micro_batch_rate,
        speedup_without_drafter=measured
        or speedup_model.without_drafter(state.spec, state.decoding),
        learnable_micro_batches=progress.learnable_micro_batches,
        unmerged_micro_batches=state.drafter.lineage.unmerged_micro_batches,
        idle_micro_batches=progress.idle_micro_batches / max(1, state.step - first_step + 1),
        reserved_seconds=progress.reserved_micro_batches / progress.micro_batch_rate / members,
        planned_seconds=seconds * (state.spec.algorithm.steps - first_step),
    )


# --- a step's beginning and end -----------------------------------------------------------------


def open_step(turn: Turn, prompts: Sequence[PromptIndex]) -> None:
    """Hold out some of the step's prompts, and keep those of the step before held out."""
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


def plan_reservation(turn: Turn, batch: RolloutBatch) -> Reservation | None:
    """Return the time to reserve for drafter training before the policy update, if it pays."""
    state = turn.state
    if not is_wanted(state) or not state.workers or not batch.keep_answers:
        return None
    verdict = gate.judge_reserved_time(state.spec, state.drafter.evidence, outlook(turn))
    free = (Duty.IDLE, Duty.ROLLOUT, Duty.DRAFTER_TRAINING)
    workers = tuple(
        worker
        for worker, known in state.workers.items()
        if known.duty in free and is_eligible(state, known)
    )
    return Reservation(verdict=verdict, workers=workers) if verdict.worth and workers else None


def start_reserved_training(turn: Turn, reservation: Reservation) -> None:
    state = turn.state
    adopt_reject_revert.explain(turn, "reserve", reservation.verdict)
    members = count_engines(state, (state.workers[worker] for worker in reservation.workers))
    seconds = reservation.verdict.cost * members
    turn.set_drafter(
        progress=msgspec.structs.replace(state.drafter.progress, reserved_seconds=seconds)
    )
    for worker in reservation.workers:
        if state.workers[worker].duty is not Duty.DRAFTER_TRAINING:
            _start_and_merge_if_due(turn, worker)


def set_idle(turn: Turn, worker: WorkerState) -> None:
    """Let a worker whose training session is over idle, and give up the merge that it owed."""
    turn.assign(worker.info.worker, Duty.IDLE)
    adopt_reject_revert.cancel_merge(turn, worker.info.incarnation)
