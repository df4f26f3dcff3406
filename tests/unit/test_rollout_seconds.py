"""The measured decoding time of rollout batches predicts what a drafter saves."""

import msgspec

from tests.samples import JOB, SPEC, started, tally, worker_info
from tlt.base.id_types import Attempt, Epoch, Incarnation, Member, Purpose, Step, WorkerId
from tlt.policies.run.coordinator import decide, new_run
from tlt.policies.run.run_state import RunState
from tlt.protocol.events import DecodingReported, RolloutDropped, WorkerJoined, WorkerLost

W0 = WorkerId("w0")
_WORKERS = (W0, WorkerId("w1"))


def _decoding_run() -> RunState:
    """Return a run whose ranks take a minute to start."""
    algorithm = msgspec.structs.replace(SPEC.algorithm, eval_every=0)
    spec = msgspec.structs.replace(SPEC, algorithm=algorithm)
    begun = started(spec, dict.fromkeys(_WORKERS, 2))
    return decide(new_run(JOB, spec), begun, 100.0)[0]


def _report(
    state: RunState, worker: int, rank: int, serial: int, step: int = 0, purpose: Purpose = "train"
) -> RunState:
    """Report three seconds of decoding."""
    chosen = DecodingReported(
        job=JOB,
        worker=_WORKERS[worker],
        incarnation=state.newest_incarnations[_WORKERS[worker]],
        rank=rank,
        serial=serial,
        step=Step(step),
        purpose=purpose,
        tallies=(tally(10, 1.0), tally(20, 2.0, bucket=2)),
    )
    return decide(state, chosen, 160.0)[0]


def _close_batch(state: RunState) -> RunState:
    """Drop all answers after eight more seconds."""
    opened = state.batch
    assert opened is not None
    for prompt, group in opened.groups.items():
        for member in range(len(group.members)):
            dropped = RolloutDropped(
                job=JOB,
                epoch=Epoch(1),
                step=opened.step,
                attempt=Attempt(0),
                purpose="train",
                prompt=prompt,
                member=Member(member),
                reason="no text",
            )
            state, _ = decide(state, dropped, 168.0)
    return state


def _longest(state: RunState) -> float | None:
    assert state.batch is not None
    return state.batch.longest_decode_seconds


def test_measures_the_rank_that_decodes_longest() -> None:
    state = _decoding_run()
    assert _longest(state) is None
    for worker, rank, serial in ((0, 0, 1), (0, 1, 1), (1, 1, 1), (1, 1, 2)):
        state = _report(state, worker, rank, serial)
    assert _longest(state) == 6.0
    assert _close_batch(state).rollout_seconds == 6.0


def test_without_reports_uses_the_time_that_passed() -> None:
    assert _close_batch(_decoding_run()).rollout_seconds == 68.0


def test_ignores_repeated_reports_and_other_batches() -> None:
    state = _report(_decoding_run(), 0, 0, 1)
    state = _report(state, 0, 0, 1)
    state = _report(state, 0, 0, 2, purpose="eval")
    state = _report(state, 0, 0, 3, step=1)
    assert _longest(state) == 3.0


def test_averages_over_rollout_batches() -> None:
    before = msgspec.structs.replace(_decoding_run(), rollout_seconds=9.0)
    assert _close_batch(_report(before, 0, 0, 1)).rollout_seconds == 6.0
    assert _close_batch(before).rollout_seconds == 9.0


def test_adds_to_the_seconds_of_a_worker_that_came_back() -> None:
    state = _report(_decoding_run(), 0, 0, 1)
    lost = WorkerLost(worker=W0, incarnation=Incarnation(1), reason="gone", returning=True)
    state, _ = decide(state, lost, 161.0)
    assert _longest(state) == 3.0
    state, _ = decide(state, WorkerJoined(info=worker_info(W0, 2, incarnation=2)), 162.0)
    assert _longest(_report(state, 0, 0, 1)) == 6.0
