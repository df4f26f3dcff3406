"""Each worker's part of a round, by its ranks; who is gone leaves its part to the others."""

import msgspec
import pytest

from tests.samples import JOB, SPEC
from tlt.config import JobSpec
from tlt.messages import JobStarted, RunCommand, RunEvent, StartRollout, WorkerInfo, WorkerLost
from tlt.policies.coordinator import decide, new_run
from tlt.types import Epoch, Incarnation, WorkerId

_RANKS = {WorkerId("w0"): 1, WorkerId("w1"): 2, WorkerId("w2"): 1}
_ANSWERS = SPEC.algorithm.prompts_per_step * SPEC.algorithm.group_size


def _told(commands: list[RunCommand]) -> dict[WorkerId, int]:
    return {c.worker: c.share for c in commands if isinstance(c, StartRollout)}


def _started(spec: JobSpec) -> RunEvent:
    workers = tuple(
        WorkerInfo(worker=w, incarnation=Incarnation(1), ranks=n, host="here", rendezvous="")
        for w, n in _RANKS.items()
    )
    return JobStarted(
        job=JOB,
        epoch=Epoch(1),
        spec=spec,
        folder="/runs",
        train_prompts=SPEC.algorithm.prompts_per_step,
        eval_prompts=0,
        workers=workers,
    )


def _spec(spread: bool) -> JobSpec:
    return msgspec.structs.replace(
        SPEC,
        algorithm=msgspec.structs.replace(SPEC.algorithm, eval_every=0),
        rollout=msgspec.structs.replace(SPEC.rollout, spread=spread),
    )


def test_parts_are_even_by_rank_and_make_up_the_round() -> None:
    _, commands = decide(new_run(JOB, _spec(spread=True)), _started(_spec(spread=True)), 0.0)
    assert _told(commands) == {"w0": _ANSWERS // 4, "w1": _ANSWERS // 2, "w2": _ANSWERS // 4}


@pytest.mark.parametrize("spread", [True, False])
def test_who_is_gone_leaves_its_part_to_the_others(spread: bool) -> None:
    state, _ = decide(new_run(JOB, _spec(spread)), _started(_spec(spread)), 0.0)
    lost = WorkerLost(
        worker=WorkerId("w2"), incarnation=Incarnation(1), reason="gone", returning=True
    )
    _, commands = decide(state, lost, 1.0)
    told = _told(commands)
    if spread:
        assert told == {"w0": -(-_ANSWERS // 3), "w1": -(-2 * _ANSWERS // 3)}
    else:
        assert told == {"w0": _ANSWERS, "w1": _ANSWERS}
