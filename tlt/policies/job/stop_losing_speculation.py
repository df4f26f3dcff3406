"""Add up the savings of speculation, and give it up once it clearly costs more than it saves."""

from tlt.policies.drafter import drafter_event_handling, training_sessions
from tlt.policies.job import rollout_batch
from tlt.policies.job.run_state import Turn, current_worker
from tlt.policies.speculation import savings_estimate
from tlt.protocol.commands import GiveUpSpeculation, StopSpeculation
from tlt.protocol.events import DecodingReported
from tlt.protocol.shared_values import WorkerInfo


def record_decoding(turn: Turn, event: DecodingReported) -> None:
    state = turn.state
    worker = current_worker(state, event.worker, event.incarnation)
    if worker is None or not state.speculation_allowed:
        return
    if event.serial <= worker.reported_serials.get(event.rank, 0):
        return
    serials = {**worker.reported_serials, event.rank: event.serial}
    turn.set_worker(event.worker, reported_serials=serials)
    costs = savings_estimate.add_tallies(state.decode_costs, event.tallies)
    turn.set(decode_costs=costs)
    if state.batch is not None:
        turn.set(batch=rollout_batch.add_decode_seconds(state.batch, event))
    drafter_event_handling.record_live_acceptance(turn, event.tallies)
    lost = savings_estimate.estimate_loss(costs)
    if lost is not None and lost.low is not None and lost.high is not None:
        _give_up(turn, lost.seconds, lost.low, lost.high)


def _give_up(turn: Turn, saved: float, low: float, high: float) -> None:
    turn.set(speculation_allowed=False)
    turn.emit(GiveUpSpeculation(job=turn.state.job, saved=saved, low=low, high=high))
    for worker in turn.state.workers.values():
        stop_speculation(turn, worker.info)
    training_sessions.stop_all(turn)


def stop_speculation(turn: Turn, info: WorkerInfo) -> None:
    turn.emit(StopSpeculation(worker=info.worker, incarnation=info.incarnation, job=turn.state.job))
