"""Workers share a rollout batch by their ranks and take over the share of a lost worker."""

import msgspec
import pytest

from tests.samples import JOB, SPEC, started
from tlt.base.id_types import Attempt, Epoch, Incarnation, Member, Step, WorkerId
from tlt.policies.run.coordinator import decide, new_run
from tlt.protocol.commands import IssuePrompts, RunCommand, StartRollout
from tlt.protocol.events import RolloutDropped, WorkerLost
from tlt.spec.config import JobSpec

_RANKS = {WorkerId("w0"): 1, WorkerId("w1"): 2, WorkerId("w2"): 1}
_ANSWERS = SPEC.algorithm.prompts_per_step * SPEC.algorithm.group_size


def _told(commands: list[RunCommand]) -> dict[WorkerId, int]:
    return {c.worker: c.share for c in commands if isinstance(c, StartRollout)}


def _spec(spread: bool) -> JobSpec:
    return msgspec.structs.replace(
        SPEC,
        algorithm=msgspec.structs.replace(SPEC.algorithm, eval_every=0),
        rollout=msgspec.structs.replace(SPEC.rollout, spread=spread),
    )


def test_shares_a_rollout_batch_evenly_by_ranks() -> None:
    _, commands = decide(new_run(JOB, _spec(spread=True)), started(_spec(spread=True), _RANKS), 0.0)
    assert _told(commands) == {"w0": _ANSWERS // 4, "w1": _ANSWERS // 2, "w2": _ANSWERS // 4}


@pytest.mark.parametrize("spread", [True, False])
def test_reassigns_the_share_of_a_lost_worker(spread: bool) -> None:
    spec = _spec(spread)
    state, commands = decide(new_run(JOB, spec), started(spec, _RANKS), 0.0)
    prompts = next(c.prompts for c in commands if isinstance(c, IssuePrompts))
    for prompt in prompts[:2]:
        dropped = RolloutDropped(
            job=JOB,
            epoch=Epoch(1),
            step=Step(0),
            attempt=Attempt(0),
            purpose="train",
            prompt=prompt,
            member=Member(0),
            reason="no text",
        )
        state, _ = decide(state, dropped, 1.0)
    lost = WorkerLost(
        worker=WorkerId("w2"), incarnation=Incarnation(1), reason="gone", returning=True
    )
    _, commands = decide(state, lost, 1.0)
    left = _ANSWERS - 2
    if spread:
        assert _told(commands) == {"w0": -(-left // 3), "w1": -(-2 * left // 3)}
    else:
        assert _told(commands) == {"w0": left, "w1": left}


def test_gives_each_worker_a_share_of_a_small_batch() -> None:
    algorithm = msgspec.structs.replace(
        SPEC.algorithm, prompts_per_step=1, group_size=2, eval_every=0
    )
    spec = msgspec.structs.replace(SPEC, algorithm=algorithm)
    _, commands = decide(new_run(JOB, spec), started(spec, _RANKS), 0.0)
    assert _told(commands) == {"w0": 1, "w1": 1, "w2": 1}
