"""Decide which workers train the drafter, and start and stop their training sessions.

Idle workers train as long as evaluations get better, and stop when they are needed.
"""

from collections.abc import Sequence

import msgspec

from tlt.base.id_types import PromptIndex, Step, WorkerId
from tlt.policies.drafter import training_evidence
from tlt.policies.drafter.data_selection import choose_held_out
from tlt.policies.drafter.training_evidence import Verdict
from tlt.policies.drafter.used_and_fallback_drafters import lacks_drafter, refusers
from tlt.policies.run import adopt_reject_revert, drafter_merges
from tlt.policies.run.run_state import (
    Duty,
    Phase,
    RunState,
    Turn,
    WorkerState,
    engines_on,
)
from tlt.policies.speculation import savings_estimate
from tlt.protocol.commands import StopDrafterTraining, TrainDrafter

_TOO_COSTLY = (
    "policy updates waited for drafter training to stop for over .5 % of the rollouts' time; "
    "it trains in fewer steps"
)
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
    session = turn.state.drafter.sessions + 1
    turn.set_drafter(sessions=session)
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
            members=engines_on(state, (Duty.DRAFTER_TRAINING,)),
            held_out=state.drafter.held_out,
        )
    )


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


def record_rollout(turn: Turn, seconds: float) -> None:
    turn.set_drafter(stopping=turn.state.drafter.stopping.add_rollout(seconds))


def record_stop(turn: Turn, seconds: float) -> None:
    """Count how long a policy update waited for a worker to stop, unless training pays."""
    if turn.state.phase is Phase.POLICY_UPDATE and not _pays(turn.state):
        turn.set_drafter(stopping=turn.state.drafter.stopping.add_wait(seconds))


def stop_ineligible(turn: Turn) -> None:
    if not refusers(turn.state.drafter.adoption):
        return
    for worker, known in turn.state.workers.items():
        if not is_eligible(turn.state, known):
            stop(turn, worker)


def is_wanted(state: RunState) -> bool:
    return state.spec.drafter.train != "off" and state.speculation_allowed


def may_train(turn: Turn) -> bool:
    """Return False if idle workers won't train in the batch to be opened."""
    return is_wanted(turn.state) and judge_idle_training(turn).worth


def _start_and_merge_if_due(turn: Turn, worker: WorkerId) -> None:
    """Start a training session, and request a merge that is due."""
    start(turn, worker)
    drafter_merges.request_if_due(turn, turn.state.workers[worker])


# --- idle workers -------------------------------------------------------------------------------


def start_if_worth(turn: Turn, worker: WorkerId) -> None:
    """Let an idle worker train, unless training rests."""
    state = turn.state
    if not is_wanted(state) or not is_eligible(state, state.workers[worker]):
        return
    verdict = judge_idle_training(turn)
    _explain_if_changed(turn, verdict)
    if verdict.worth and _keeps_answers(state):
        _start_and_merge_if_due(turn, worker)


def _keeps_answers(state: RunState) -> bool:
    return state.batch is None or state.batch.keep_answers


def _explain_if_changed(turn: Turn, verdict: Verdict) -> None:
    """Explain a decision once for all workers and steps that it holds for."""
    if verdict.why == _TOO_COSTLY:
        _explain_limit_once(turn)
        return
    kind = "train" if verdict.worth else "wait"
    evidence, explained = turn.state.drafter.evidence, f"{kind}: {verdict.why}"
    if evidence.explained != explained:
        turn.set_drafter(evidence=msgspec.structs.replace(evidence, explained=explained))
        adopt_reject_revert.explain(turn, kind, verdict.why)


def _explain_limit_once(turn: Turn) -> None:
    """Explain it once: steps that train alternate with steps that don't."""
    stopping = turn.state.drafter.stopping
    if not stopping.explained:
        turn.set_drafter(stopping=msgspec.structs.replace(stopping, explained=True))
        adopt_reject_revert.explain(turn, "wait", _TOO_COSTLY)


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


def judge_idle_training(turn: Turn) -> Verdict:
    state = turn.state
    opened = state.phase is not Phase.EVALUATING
    to_come = state.spec.algorithm.steps - state.step - opened
    verdict = training_evidence.judge_idle_training(
        state.spec, state.drafter.evidence, state.step, to_come
    )
    limited = state.spec.drafter.train == "auto" and state.drafter.stopping.too_high
    if verdict.worth and limited and not _pays(state):
        return Verdict(worth=False, why=_TOO_COSTLY)
    return verdict


def _pays(state: RunState) -> bool:
    """Return True while the drafter improves and speculation saves time for certain."""
    if not training_evidence.improves(state.drafter.evidence):
        return False
    savings = savings_estimate.estimate_savings(state.decoding, open_seconds=0.0)
    return savings is not None and savings.total.low > 0.0


# --- a step's beginning, a session's end ----------------------------------------------------------


def open_step(turn: Turn, step: Step, prompts: Sequence[PromptIndex]) -> None:
    """Hold out some of a step's prompts, and keep those of the step before held out."""
    held_out = turn.state.drafter.held_out
    # this may be the next step's
    before = {s: held for s, held in held_out.items() if s >= turn.state.step - 1}
    turn.set_drafter(held_out={**before, step: choose_held_out(step, prompts)})


def record_failure(turn: Turn) -> None:
    """Count a merge for which the idle time didn't suffice as one that gained nothing."""
    evidence = training_evidence.record_failure(turn.state.drafter.evidence, turn.state.step)
    turn.set_drafter(evidence=evidence)


def set_idle(turn: Turn, worker: WorkerState) -> None:
    """Let a worker whose training session is over idle, and give up the merge that it owed."""
    turn.assign(worker.info.worker, Duty.IDLE)
    adopt_reject_revert.cancel_merge(turn, worker.info.incarnation)
