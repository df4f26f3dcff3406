"""The work of an event may grow with groups and workers, but not with rollouts.

Other workers add nothing to it but their entry of a dictionary that is copied.

The tests count the instructions that the interpreter executes in `tlt` and the entries that are
copied when a dictionary of the state is rebuilt, because counts are exact and times are not.
"""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import pytest

from tests.samples import ANSWER_REF
from tests.simulation.incarnation import WorkerIncarnation
from tests.simulation.specs import small_spec
from tests.simulation.started_run import WORKER, started_run
from tests.simulation.worker_events import JOB, answer, reward
from tlt.base.id_types import Attempt, Epoch, Incarnation, Member, PromptIndex, Step, WorkerId
from tlt.policies.algorithm.sample_sharding import Sample, share_samples
from tlt.policies.run.coordinator import decide, new_run
from tlt.policies.run.run_state import Duty, Phase, RunState
from tlt.protocol.commands import ExplainDrafterDecision, PromptIssued, StartJob, TrainDrafter
from tlt.protocol.events import RolloutFinished, RolloutScored, RunEvent, WorkerIdled
from tlt.protocol.shared_values import Prepared, WorkerInfo


def _started(prompts: int, group: int) -> RunState:
    return started_run(small_spec(steps=1, prompts=prompts, group=group))[0]


def _start_with(workers: int) -> StartJob:
    """Start a job whose idle workers always train."""
    infos = tuple(
        WorkerInfo(
            worker=WorkerId(f"w{n}"),
            incarnation=Incarnation(n + 1),
            ranks=1,
            host="host",
            rendezvous="host:1",
        )
        for n in range(workers)
    )
    return StartJob(
        folder="/runs",
        job=JOB,
        epoch=Epoch(1),
        spec=small_spec(steps=9, prompts=4, group=8, train="always"),
        prepared=Prepared(train_prompts=4, eval_prompts=0),
        workers=infos,
    )


def _with_workers(workers: int) -> RunState:
    start = _start_with(workers)
    return decide(new_run(JOB, start.spec), start, 0.0)[0]


def _finished(prompt: int, member: int) -> RolloutFinished:
    issued = PromptIssued(
        job=JOB,
        epoch=Epoch(1),
        step=Step(0),
        attempt=Attempt(0),
        purpose="train",
        prompt=PromptIndex(prompt),
        member=Member(member),
        tokens=(1,),
    )
    return answer(WorkerIncarnation(WORKER, Incarnation(1), 1), issued)


def _scored(state: RunState, done: RolloutFinished) -> RolloutScored:
    return RolloutScored(
        job=JOB,
        epoch=done.epoch,
        step=done.step,
        attempt=done.attempt,
        purpose=done.purpose,
        prompt=done.prompt,
        member=done.member,
        length=done.length,
        reward=reward(state.spec, done),
    )


def _idled() -> WorkerIdled:
    return WorkerIdled(
        job=JOB,
        epoch=Epoch(1),
        step=Step(0),
        attempt=Attempt(0),
        worker=WORKER,
        incarnation=Incarnation(1),
        purpose="train",
        requeues=0,
    )


def _instructions(work: Callable[[], Any]) -> int:
    """Count the bytecodes that `work` executes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    # finalisers of other tests' objects would be counted
    gc.collect()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@pytest.mark.parametrize("event", [_finished(0, 0), _idled()], ids=["finished", "idled"])
def test_instructions_of_an_event_do_not_grow_with_the_rollouts(event: RunEvent) -> None:
    """2048 rollouts take as many instructions as 32 in groups of the same size."""
    small, large = _started(4, 8), _started(256, 8)
    few = _instructions(lambda: decide(small, event, 0.0))
    many = _instructions(lambda: decide(large, event, 0.0))
    assert 0 < many <= few + 10


def test_a_training_decision_takes_few_instructions() -> None:
    state = _started(4, 8)
    assert state.batch is not None
    state = msgspec.structs.replace(
        state,
        spec=small_spec(steps=9, prompts=4, group=8, train="auto"),
        batch=msgspec.structs.replace(state.batch, keep_answers=True),
    )
    after, commands = decide(state, _idled(), 0.0)
    assert after.workers[WORKER].duty is Duty.DRAFTER_TRAINING
    assert [type(command) for command in commands] == [ExplainDrafterDecision, TrainDrafter]
    assert _instructions(lambda: decide(state, _idled(), 0.0)) < 3500


def test_a_large_rollout_batch_takes_few_instructions() -> None:
    """The test finishes and scores all of 2048 rollouts except the last."""
    state = _started(256, 8)
    answers = [_finished(prompt, member) for prompt in range(256) for member in range(8)]
    events: list[RunEvent] = []
    for done in answers:
        events += [done, _scored(state, done)]

    def run() -> RunState:
        now = state
        for event in events[:-1]:
            now, _ = decide(now, event, 0.0)
        return now

    spent = _instructions(run)
    assert spent < 2500 * len(events)
    last, _ = decide(run(), events[-1], 0.0)
    assert last.phase is Phase.POLICY_UPDATE


def _scored_first(state: RunState) -> RolloutScored:
    return _scored(state, _finished(0, 0))


@pytest.mark.parametrize(
    "event",
    [lambda _: _finished(0, 0), _scored_first, lambda _: _idled()],
    ids=["finished", "scored", "idled"],
)
def test_other_workers_add_no_instructions_to_an_event(
    event: Callable[[RunState], RunEvent],
) -> None:
    few, many = _with_workers(16), _with_workers(1024)
    before = _instructions(lambda: decide(few, event(few), 0.0))
    assert _instructions(lambda: decide(many, event(many), 0.0)) == before > 0


def test_another_worker_adds_the_same_instructions_to_a_start() -> None:
    """All workers join, and each is assigned to the first rollout batch."""
    counts: list[int] = []
    for workers in (16, 256):
        start = _start_with(workers)
        run = new_run(JOB, start.spec)
        counts.append(_instructions(lambda run=run, start=start: decide(run, start, 0.0)))
    assert counts[1] <= 16 * counts[0]


def test_an_update_for_many_workers_takes_few_instructions() -> None:
    """Sharing samples goes through them once, and not once for each worker."""
    samples = [
        Sample(PromptIndex(n), Member(0), 1.0, 1.0, 100 + n % 7, ANSWER_REF) for n in range(512)
    ]
    few = _instructions(lambda: share_samples(samples, [], [1] * 16, 1))
    many = _instructions(lambda: share_samples(samples, [], [1] * 256, 1))
    assert many <= few + 200 * (256 - 16)


def test_an_event_copies_one_group_and_the_table_of_groups() -> None:
    """All other parts of the state stay the same objects."""
    before = _started(256, 8)
    after, _ = decide(before, _finished(3, 1), 0.0)
    assert before.batch is not None
    assert after.batch is not None
    changed = [p for p, g in after.batch.groups.items() if g is not before.batch.groups[p]]
    assert changed == [3]
    assert after.workers is before.workers
    assert after.policy.plans is before.policy.plans
