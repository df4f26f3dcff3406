"""An evaluation answers every set as often as its spec says, and a job may be nothing else."""

import msgspec

from tests.simulation.specs import small_spec
from tests.simulation.started_run import WORKER, started_run
from tests.simulation.walk import MOST_DELIVERIES
from tests.simulation.worker_events import JOB
from tests.simulation.world import EVAL_SETS, World
from tlt.base.id_types import (
    Attempt,
    Digest,
    Epoch,
    Incarnation,
    Member,
    PolicyVersion,
    PromptIndex,
    Step,
)
from tlt.policies.run.coordinator import decide
from tlt.policies.run.run_state import Phase, RunState
from tlt.protocol.commands import EndJob, IssuePrompts, RecordRolloutBatch, RunCommand, UpdatePolicy
from tlt.protocol.events import RolloutDropped, RolloutFinished, RolloutScored
from tlt.protocol.refs import AnswerRef, BlobRef, Checkpoint, StartingCheckpoint
from tlt.protocol.shared_values import EvaluationAnswer
from tlt.spec.config import JobSpec


def evaluating_spec() -> JobSpec:
    spec = small_spec(eval_every=1)
    return msgspec.structs.replace(spec, algorithm=msgspec.structs.replace(spec.algorithm, steps=0))


def settle(state: RunState, step: int = 0) -> tuple[RunState, list[RunCommand]]:
    """Answer and score all prompts: a reward of 1 for even members, the last answer is dropped."""
    commands: list[RunCommand] = []
    assert state.batch is not None
    answers = [(p, m) for p, group in state.batch.groups.items() for m in range(len(group.members))]
    for prompt, member in answers:
        common = {
            "job": JOB,
            "epoch": Epoch(1),
            "step": Step(step),
            "attempt": Attempt(0),
            "purpose": "eval",
            "prompt": PromptIndex(prompt),
            "member": Member(member),
        }
        if (prompt, member) == answers[-1]:
            events = [RolloutDropped(**common, reason="lost")]
        else:
            events = [
                RolloutFinished(
                    **common,
                    worker=WORKER,
                    incarnation=Incarnation(1),
                    answer=AnswerRef(file="1.0", offset=0, bytes=1, digest=Digest("0")),
                    length=5 + prompt,
                    accepted=(),
                    batch=1,
                    decode_seconds=1.0,
                    stop="length" if member else "stop",
                ),
                RolloutScored(
                    **common, length=5 + prompt, reward=float(member % 2 == 0), final=str(member)
                ),
            ]
        for event in events:
            state, caused = decide(state, event, 1.0)
            commands += caused
    return state, commands


def test_issues_as_many_answers_as_each_set_says() -> None:
    _, commands = started_run(evaluating_spec(), eval_sets=EVAL_SETS)
    (issued,) = (command for command in commands if isinstance(command, IssuePrompts))
    assert (issued.prompts, issued.counts) == ((0, 1, 2), (2, 1, 1))


def test_a_job_of_no_steps_ends_with_its_evaluation() -> None:
    state, _ = started_run(evaluating_spec(), eval_sets=EVAL_SETS)
    state, commands = settle(state)
    assert state.phase is Phase.ENDED
    assert commands[-1] == EndJob(job=JOB, status="done", error=None)
    assert not any(isinstance(command, UpdatePolicy) for command in commands)
    (record,) = (command for command in commands if isinstance(command, RecordRolloutBatch))
    right = EvaluationAnswer(reward=1.0, length=5, truncated=False, final="0", correct=True)
    wrong = EvaluationAnswer(reward=0.0, length=5, truncated=True, final="1")
    other = EvaluationAnswer(reward=1.0, length=6, truncated=False, final="0", correct=True)
    dropped = EvaluationAnswer(reward=None, length=0, truncated=False)
    assert [each.name for each in record.sets] == ["hard", "easy"]
    assert [each.prompts for each in record.sets] == [((right, wrong),), ((other,), (dropped,))]


def test_it_may_evaluate_the_checkpoint_of_another_job() -> None:
    saved = Checkpoint(
        version=PolicyVersion(7), weights=BlobRef(digest=Digest("w"), bytes=1), optimiser=None
    )
    start_from = StartingCheckpoint(job=JOB, folder="/other", checkpoint=saved)
    state, _ = started_run(evaluating_spec(), eval_sets=EVAL_SETS, starts_from=start_from)
    state, commands = settle(state, step=7)
    (record,) = (command for command in commands if isinstance(command, RecordRolloutBatch))
    assert (record.version, state.phase) == (7, Phase.ENDED)


def test_a_journal_of_an_earlier_version_has_one_set_with_one_answer_each() -> None:
    state, commands = started_run(evaluating_spec(), unnamed=3)
    (issued,) = (command for command in commands if isinstance(command, IssuePrompts))
    assert issued.counts == (1, 1, 1)
    _, commands = settle(state)
    (record,) = (command for command in commands if isinstance(command, RecordRolloutBatch))
    assert [(each.name, len(each.prompts)) for each in record.sets] == [("", 3)]


def test_an_evaluation_job_survives_lost_workers() -> None:
    world = World(evaluating_spec(), [1, 2])
    lost = next(move for move in world.faults() if move.kind == "kill")
    world.do(lost)
    world.calm()
    world.run_out(MOST_DELIVERIES)
    assert world.status == "done"
    assert world.replay() == world.state
