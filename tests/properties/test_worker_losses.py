"""Losses of workers are forgotten after ten steps, so that a long job doesn't die of them."""

import msgspec
import pytest

from tests.properties.test_keeping_answers import started
from tests.simulation.started_run import WORKER
from tlt.base.id_types import Step
from tlt.policies.run import worker_membership
from tlt.policies.run.run_state import Turn
from tlt.protocol.commands import EndJob
from tlt.protocol.events import WorkerLost
from tlt.spec.config import WorkersSpec


@pytest.mark.parametrize(("step", "fails"), [(9, True), (10, False)])
def test_losses_of_the_last_ten_steps_count(step: int, fails: bool) -> None:
    state, _ = started("off")
    limit = 5
    spec = msgspec.structs.replace(state.spec, workers=WorkersSpec(max_restarts=limit))
    membership = msgspec.structs.replace(state.membership, loss_steps=(Step(0),) * limit)
    state = msgspec.structs.replace(state, spec=spec, membership=membership, step=Step(step))
    turn = Turn(state, 0.0)
    incarnation = state.workers[WORKER].info.incarnation
    worker_membership.lose(
        turn, WorkerLost(worker=WORKER, incarnation=incarnation, reason="test", returning=True)
    )
    assert turn.state.losses == limit + 1
    ended = [command for command in turn.commands if isinstance(command, EndJob)]
    assert [command.status for command in ended] == (["failed"] if fails else [])
