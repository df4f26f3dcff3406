"""Account for what decoding cost, and give up speculation that clearly costs more than it saves."""

from tlt.policies.drafter import drafter_event_handling, training_sessions
from tlt.policies.job import rollout_batch
from tlt.policies.job.rollout_batch import RolloutBatch
from tlt.policies.job.run_state import RunState, Turn, current_worker
from tlt.policies.speculation import plain_replay, savings_estimate
from tlt.policies.speculation.plain_replay import Replay
from tlt.policies.speculation.plain_step_costs import PlainStepCosts
from tlt.protocol.commands import GiveUpSpeculation, StopSpeculation
from tlt.protocol.events import DecodingReported
from tlt.protocol.shared_values import WorkerInfo

# seconds of a step by its rows, up to a factor, before control runs have measured them
_USUAL_EXPONENT = 0.5


def record_decoding(turn: Turn, event: DecodingReported) -> None:
    state = turn.state
    worker = current_worker(state, event.worker, event.incarnation)
    if worker is None or not state.speculation_allowed:
        return
    if event.serial <= worker.reported_serials.get(event.rank, 0):
        return
    serials = {**worker.reported_serials, event.rank: event.serial}
    turn.set_worker(event.worker, reported_serials=serials)
    beside = training_sessions.is_any_open(state)
    turn.set(decoding=savings_estimate.add_tallies(state.decoding, event.tallies, beside))
    if state.batch is not None:
        turn.set(batch=rollout_batch.add_decode_seconds(state.batch, event))
    drafter_event_handling.record_live_acceptance(turn, event.tallies)


def account_for_batch(turn: Turn, batch: RolloutBatch) -> None:
    """Count the plain steps of a settled batch, and give up if speculation lost time so far."""
    state = turn.state
    if not state.speculation_allowed:
        return
    plain = savings_estimate.plain_step_costs(state.decoding)
    # without a control run so far nothing is known of what the batch would have taken
    replayed = None if state.decoding.runs == 0 else _replay_batch(state, batch, plain)
    if replayed is None:
        turn.set(decoding=savings_estimate.exclude(state.decoding, batch.decode_work))
        return
    decoding = savings_estimate.add_replay(state.decoding, replayed)
    turn.set(decoding=decoding)
    if plain is not None and batch.decode_work > 0.0:
        saved = plain.saving(replayed.steps, batch.decode_work)
        drafter_event_handling.record_speedup(turn, batch, saved)
    lost = savings_estimate.estimate_loss(decoding, open_seconds=0.0)
    if lost is not None:
        _give_up(turn, lost.seconds, lost.low, lost.high)


def _replay_batch(
    state: RunState, batch: RolloutBatch, plain: PlainStepCosts | None
) -> Replay | None:
    """Replay a settled batch without speculation; None if some of it was lost on the way."""
    ranks = sum(worker.info.ranks for worker in state.workers.values())
    if batch.requeues > 0 or batch.dropped > 0 or ranks == 0:
        return None
    return plain_replay.replay(
        batch.lengths(),
        ranks,
        state.spec.rollout.slots,
        plain.seconds if plain is not None else lambda rows: rows**_USUAL_EXPONENT,
    )


def _give_up(turn: Turn, saved: float, low: float, high: float) -> None:
    turn.set(speculation_allowed=False)
    turn.emit(GiveUpSpeculation(job=turn.state.job, saved=saved, low=low, high=high))
    for worker in turn.state.workers.values():
        stop_speculation(turn, worker.info)
    training_sessions.stop_all(turn)


def stop_speculation(turn: Turn, info: WorkerInfo) -> None:
    turn.emit(StopSpeculation(worker=info.worker, incarnation=info.incarnation, job=turn.state.job))
