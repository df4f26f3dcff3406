"""A job that starts from a checkpoint of another makes the steps that the other would have made."""

from random import Random
from typing import Literal

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.samples import started
from tests.simulation.incarnation import blob
from tests.simulation.specs import small_spec
from tests.simulation.walk import finish, step
from tests.simulation.worker_events import JOB
from tests.simulation.world import World
from tlt.base.id_types import Attempt, Digest, DrafterVersion, JobId, PolicyVersion, Step, WorkerId
from tlt.policies.algorithm.prompt_order import cursor_at, take
from tlt.policies.run.coordinator import decide, new_run
from tlt.policies.run.run_state import RunState
from tlt.protocol.commands import IssuePrompts, RunCommand, StartRollout, TrainDrafter
from tlt.protocol.events import WorkerIdled
from tlt.protocol.refs import Checkpoint, DrafterRef, StartingCheckpoint
from tlt.spec.config import JobSpec

seeds = st.integers(0, 2**32 - 1)
_EXAMPLES = settings().max_examples
_WORKER = WorkerId("w0")


def starting_checkpoint(version: int, content: str = "weights") -> StartingCheckpoint:
    checkpoint = Checkpoint(
        version=PolicyVersion(version),
        weights=blob(content),
        optimiser=blob(f"optimiser of {content}"),
    )
    return StartingCheckpoint(job=JobId("other-1"), folder="/other", checkpoint=checkpoint)


def with_drafter(start: StartingCheckpoint) -> StartingCheckpoint:
    drafter = DrafterRef(
        version=DrafterVersion(4),
        weights=blob("drafter"),
        policy=PolicyVersion(1),
        architecture=Digest("shape"),
        updates=30,
        micro_batches=40,
    )
    return msgspec.structs.replace(start, drafter=drafter, accept_length=2.5)


def start(spec: JobSpec, checkpoint: StartingCheckpoint) -> tuple[RunState, list[RunCommand]]:
    event = started(spec, {_WORKER: 1})
    prepared = msgspec.structs.replace(event.prepared, train_prompts=5)
    event = msgspec.structs.replace(event, prepared=prepared, starts_from=checkpoint)
    return decide(new_run(JOB, spec), event, 0.0)


@given(seed=seeds, shards=st.sampled_from([1, "all"]), dynamic=st.booleans())
@settings(max_examples=max(5, _EXAMPLES // 4))
def test_leads_to_the_weights_of_an_undisturbed_job(
    seed: int, shards: Literal[1, "all"], dynamic: bool
) -> None:
    """Other workers make the steps; rewards depend on the attempt if some of them are lost."""
    chooser = Random(seed)
    spec = small_spec(
        steps=4,
        checkpoint_every=1,
        eval_every=2,
        seed=seed % 7,
        shards=shards,
        dynamic_sampling=dynamic,
    )
    undisturbed, version = World(spec, [1, 1]), chooser.randint(1, 3)
    while undisturbed.state.policy.checkpoint is None or (
        undisturbed.state.policy.checkpoint.version < version
    ):
        step(undisturbed, chooser, faults=0.0, overtaking=0.0)
    cursor = undisturbed.state.cursor
    finish(undisturbed)
    contents = undisturbed.checks.contents
    checkpoint = msgspec.structs.replace(
        starting_checkpoint(version, contents[version]), cursor=cursor
    )
    resumed = World(spec, [2, 1, 1], starts_from=checkpoint)
    faults = chooser.choice([0.0, 0.05])
    for _ in range(chooser.randint(0, 200)):
        if not resumed.ended:
            step(resumed, chooser, faults, overtaking=0.2)
    finish(resumed)
    if not faults:
        expected = {v: content for v, content in contents.items() if v == 0 or v > version}
        assert resumed.checks.contents == expected


def test_draws_the_prompts_of_the_next_step_with_the_saved_policy() -> None:
    spec = small_spec(steps=4)
    state, commands = start(spec, starting_checkpoint(3))
    (issued,) = [c for c in commands if isinstance(c, IssuePrompts)]
    assert (issued.step, issued.purpose) == (3, "train")
    assert issued.prompts == take(spec, cursor_at(spec, Step(3), 5), 5, len(issued.prompts))[0]
    (rollout,) = [c for c in commands if isinstance(c, StartRollout)]
    assert (rollout.policy.version, rollout.policy.weights) == (3, blob("weights"))
    assert state.policy.checkpoint == starting_checkpoint(3).checkpoint


def test_proposes_with_the_drafter_and_trains_it_further() -> None:
    spec = small_spec(steps=4, train="always")
    state, commands = start(spec, with_drafter(starting_checkpoint(2)))
    (rollout,) = [c for c in commands if isinstance(c, StartRollout)]
    assert rollout.drafter is not None
    assert rollout.drafter.weights == blob("drafter")
    idled = WorkerIdled(
        job=JOB,
        epoch=state.epoch,
        step=rollout.step,
        attempt=Attempt(0),
        worker=_WORKER,
        incarnation=rollout.incarnation,
        purpose="train",
        requeues=rollout.requeues,
    )
    _, commands = decide(state, idled, 1.0)
    (train,) = [c for c in commands if isinstance(c, TrainDrafter)]
    assert train.base.weights == blob("drafter")
    assert train.base.version > rollout.drafter.version
    assert (train.base.updates, train.base.micro_batches) == (30, 40)
