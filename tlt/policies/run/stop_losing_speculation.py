"""Account for what decoding cost, and give up speculation that clearly costs more than it saves.

After some batches it is tried again, because answers become longer and drafters better. Each
attempt that fails makes the pause longer.
"""

from collections.abc import Callable
from functools import partial

import msgspec

from tlt.policies.run import drafter_outcomes, drafter_training_scheduler, rollout_batch
from tlt.policies.run.chosen_sizes import fewest_slots
from tlt.policies.run.rollout_batch import RolloutBatch
from tlt.policies.run.run_state import RunState, Turn, all_engines, current_worker
from tlt.policies.speculation import plain_replay, savings_estimate
from tlt.policies.speculation.plain_replay import ExtraGroups, Replay
from tlt.policies.speculation.plain_step_costs import PlainStepCosts
from tlt.policies.speculation.savings_estimate import DecodeAccount
from tlt.protocol.commands import GiveUpSpeculation, ResumeSpeculation
from tlt.protocol.events import DecodingReported

# seconds of a step by its rows, up to a factor, before control runs have measured them
_USUAL_EXPONENT = 0.5
# batches of the pause after an attempt, for each of its batches and each attempt that has failed
_PAUSE = 4


def record_decoding(turn: Turn, event: DecodingReported) -> None:
    state = turn.state
    worker = current_worker(state, event.worker, event.incarnation)
    if worker is None:
        return
    if event.serial <= worker.reported_serials.get(event.rank, 0):
        return
    serials = {**worker.reported_serials, event.rank: event.serial}
    turn.set_worker(event.worker, reported_serials=serials)
    if not state.speculation_allowed:
        return
    beside = drafter_training_scheduler.is_any_open(state)
    _add(turn, partial(savings_estimate.add_tallies, tallies=event.tallies, beside_training=beside))
    if state.batch is not None and rollout_batch.is_decoding_of(state.batch, event):
        turn.set(batch=rollout_batch.add_decode_work(state.batch, event))
    elif state.decoding.newest is None:
        # the batch was closed before its last report, and could not be replayed
        _add(turn, partial(savings_estimate.exclude, seconds=sum(t.work for t in event.tallies)))
    drafter_outcomes.record_live_acceptance(turn, event.tallies)


def account_for_batch(turn: Turn, batch: RolloutBatch) -> None:
    """Count the plain steps of a settled batch, and give up if speculation lost time so far."""
    state = turn.state
    attempt = state.attempt.count_batch()
    turn.set(attempt=attempt)
    if not state.speculation_allowed:
        if attempt.batches >= attempt.pause:
            turn.set(attempt=attempt.resume())
            turn.emit(ResumeSpeculation(job=state.job))
        return
    plain = savings_estimate.plain_step_costs(state.decoding)
    # without a control run so far nothing is known of what the batch would have taken
    replayed = None if state.decoding.runs == 0 else _replay_batch(state, batch, plain)
    if replayed is None:
        _add(turn, partial(savings_estimate.exclude, seconds=batch.decode_work))
        return
    _add(turn, partial(savings_estimate.add_replay, batch=replayed))
    lost = savings_estimate.estimate_loss(turn.state.attempt.decoding, open_seconds=0.0)
    if lost is not None:
        _give_up(turn, lost.seconds, lost.low, lost.high)


def _add(turn: Turn, add: Callable[[DecodeAccount], DecodeAccount]) -> None:
    """Add to the accounts of the job and of this attempt."""
    attempt = turn.state.attempt
    added = msgspec.structs.replace(attempt, decoding=add(attempt.decoding))
    turn.set(decoding=add(turn.state.decoding), attempt=added)


def _replay_batch(
    state: RunState, batch: RolloutBatch, plain: PlainStepCosts | None
) -> Replay | None:
    """Replay a settled batch without speculation; None if some of it was lost on the way.

    Where answers are cut or begin before their step, others would without speculation.
    """
    engines = all_engines(state)
    early = state.spec.rollout.partial or state.spec.algorithm.staleness
    if early or batch.wanted is not None:
        return None
    if batch.requeues > 0 or batch.dropped > 0 or engines == 0:
        return None
    return plain_replay.replay(
        batch.lengths(),
        engines,
        fewest_slots(state),
        plain.seconds if plain is not None else lambda rows: rows**_USUAL_EXPONENT,
        _extra_groups(state, batch),
    )


def _extra_groups(state: RunState, batch: RolloutBatch) -> ExtraGroups | None:
    if not batch.extra:
        return None
    agreeing = (n for n, group in enumerate(batch.groups.values()) if group.agrees)
    size = state.spec.algorithm.group_size
    return ExtraGroups(size=size, count=batch.extra, replaceable=frozenset(agreeing))


def _give_up(turn: Turn, saved: float, low: float, high: float) -> None:
    paused = turn.state.attempt.give_up(_PAUSE)
    turn.set(attempt=paused)
    turn.emit(
        GiveUpSpeculation(
            job=turn.state.job, savings=saved, low=low, high=high, batches=paused.pause
        )
    )
    drafter_training_scheduler.stop_all(turn)
