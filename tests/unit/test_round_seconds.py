"""How long a round's answers take, for what a drafter may save of those to come."""

import msgspec
import pytest

from tests.samples import JOB, SPEC, tally
from tlt.messages import JobStarted, StrategyChosen, WorkerInfo
from tlt.policies.coordinator import decide, new_run
from tlt.policies.lessons import round_seconds
from tlt.policies.run_state import RunState, Turn
from tlt.types import Epoch, Incarnation, Purpose, Step, WorkerId

_WORKERS = (WorkerId("w0"), WorkerId("w1"))


def _rolling() -> RunState:
    """Its ranks start for a minute before they decode."""
    algorithm = msgspec.structs.replace(SPEC.algorithm, eval_every=0)
    spec = msgspec.structs.replace(SPEC, algorithm=algorithm)
    workers = tuple(
        WorkerInfo(worker=w, incarnation=Incarnation(1), ranks=2, host="here", rendezvous="")
        for w in _WORKERS
    )
    started = JobStarted(
        job=JOB,
        epoch=Epoch(1),
        spec=spec,
        folder="/runs",
        train_prompts=SPEC.algorithm.prompts_per_step,
        eval_prompts=0,
        workers=workers,
    )
    return decide(new_run(JOB, spec), started, 100.0)[0]


def _told(
    state: RunState, worker: int, rank: int, serial: int, purpose: Purpose = "train"
) -> RunState:
    """Three seconds of decoding."""
    chosen = StrategyChosen(
        job=JOB,
        worker=_WORKERS[worker],
        incarnation=Incarnation(1),
        rank=rank,
        serial=serial,
        step=Step(0),
        purpose=purpose,
        tallies=(tally(10, 1.0), tally(20, 2.0, bucket=2)),
    )
    return decide(state, chosen, 160.0)[0]


def test_the_start_of_ranks_is_no_part_of_it() -> None:
    state = _rolling()
    assert round_seconds(Turn(state, 160.0)) == 60.0
    state = _told(state, 0, 0, 1)
    state = _told(state, 0, 1, 1)
    state = _told(state, 1, 1, 1)
    assert round_seconds(Turn(state, 168.0)) == 3.0
    state = _told(state, 1, 1, 2)
    assert round_seconds(Turn(state, 168.0)) == 6.0


def test_what_is_told_again_or_of_another_round_is_not_counted() -> None:
    state = _told(_rolling(), 0, 0, 1)
    state = _told(state, 0, 0, 1)
    state = _told(state, 0, 0, 2, purpose="eval")
    assert round_seconds(Turn(state, 168.0)) == 3.0


def test_a_round_of_short_answers_is_not_taken_for_the_usual() -> None:
    state = msgspec.structs.replace(_told(_rolling(), 0, 0, 1), rolled_seconds=9.0)
    assert round_seconds(Turn(state, 168.0)) == pytest.approx(6.0)
