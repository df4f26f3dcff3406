"""A run that has just started on one worker, for tests of single decisions."""

from collections.abc import Sequence

from tests.simulation.worker_events import JOB
from tlt.base.id_types import Epoch, Incarnation, WorkerId
from tlt.policies.run.coordinator import decide, new_run
from tlt.policies.run.run_state import RunState
from tlt.protocol.commands import RunCommand, StartJob
from tlt.protocol.refs import StartingCheckpoint
from tlt.protocol.shared_values import Prepared, PromptSet, WorkerInfo
from tlt.spec.config import JobSpec

WORKER = WorkerId("w0")


def started_run(
    spec: JobSpec,
    train_sources: tuple[int, ...] = (),
    eval_sets: tuple[PromptSet, ...] = (),
    starts_from: StartingCheckpoint | None = None,
    unnamed: int = 0,
    without_workers: bool = False,
) -> tuple[RunState, Sequence[RunCommand]]:
    """Start with `unnamed` held-out prompts of no set, as in journals of earlier versions."""
    info = WorkerInfo(
        worker=WORKER, incarnation=Incarnation(1), ranks=1, host="host", rendezvous="host:1"
    )
    event = StartJob(
        folder="/runs",
        job=JOB,
        epoch=Epoch(1),
        spec=spec,
        prepared=Prepared(
            train_prompts=spec.algorithm.prompts_per_step,
            train_sources=train_sources,
            eval_prompts=unnamed + sum(each.prompts for each in eval_sets),
            eval_sets=eval_sets,
        ),
        workers=() if without_workers else (info,),
        starts_from=starts_from,
    )
    return decide(new_run(JOB, spec), event, 0.0)
