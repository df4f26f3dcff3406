"""Answers are kept for drafter training only in batches in which it may pay."""

import msgspec
import pytest

from tests.simulation.specs import small_spec
from tests.simulation.started_run import WORKER, started_run
from tests.simulation.worker_events import JOB
from tlt.base.id_types import Attempt, Epoch, Incarnation, Step
from tlt.policies.drafter.training_evidence import TrainingEvidence
from tlt.policies.run import drafter_training_scheduler
from tlt.policies.run.coordinator import decide
from tlt.policies.run.run_state import Duty, RunState, SpeculationAttempt, Turn
from tlt.protocol.commands import StartRollout, TrainDrafter
from tlt.protocol.events import WorkerIdled


def started(train: str) -> tuple[RunState, list[StartRollout]]:
    spec = small_spec(steps=9, prompts=4, group=8, train=train)  # pyright: ignore
    state, commands = started_run(spec)
    return state, [command for command in commands if isinstance(command, StartRollout)]


@pytest.mark.parametrize(("train", "kept"), [("auto", True), ("always", True), ("off", False)])
def test_first_batch_is_kept_if_the_job_may_train(train: str, kept: bool) -> None:
    state, rollouts = started(train)
    assert state.batch is not None
    assert state.batch.keep_answers is kept
    assert [command.keep_answers for command in rollouts] == [kept]


@pytest.mark.parametrize(("rests_until", "kept"), [(1, False), (0, True)])
def test_batches_are_kept_unless_training_rests(rests_until: int, kept: bool) -> None:
    state = started("auto")[0]
    evidence = TrainingEvidence(rests_until=Step(rests_until))
    drafter = msgspec.structs.replace(state.drafter, evidence=evidence)
    state = msgspec.structs.replace(state, drafter=drafter)
    assert drafter_training_scheduler.may_train(Turn(state, 0.0)) is kept
    given_up = msgspec.structs.replace(state, attempt=SpeculationAttempt(allowed=False))
    assert not drafter_training_scheduler.may_train(Turn(given_up, 0.0))


@pytest.mark.parametrize("kept", [True, False])
def test_idle_workers_train_only_where_answers_are_kept(kept: bool) -> None:
    state = started("always")[0]
    assert state.batch is not None
    batch = msgspec.structs.replace(state.batch, keep_answers=kept)
    idled = WorkerIdled(
        job=JOB,
        epoch=Epoch(1),
        step=Step(0),
        attempt=Attempt(0),
        worker=WORKER,
        incarnation=Incarnation(1),
        purpose="train",
        requeues=0,
    )
    after, commands = decide(msgspec.structs.replace(state, batch=batch), idled, 1.0)
    trains = any(isinstance(command, TrainDrafter) for command in commands)
    assert trains is kept
    assert after.workers[WORKER].duty is (Duty.DRAFTER_TRAINING if kept else Duty.IDLE)
