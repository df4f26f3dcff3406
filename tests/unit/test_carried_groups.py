"""An answer that was cut is put into the queue once, however many steps it waits there."""

from tests.samples import JOB, ORIGIN
from tests.simulation.specs import small_spec
from tlt.base.id_types import Member, PromptIndex, Step
from tlt.policies.run import partial_rollouts, rollout_batch
from tlt.policies.run.coordinator import new_run
from tlt.policies.run.rollout_batch import CarriedGroup, RolloutBatch
from tlt.policies.run.run_state import Turn
from tlt.protocol.commands import ResumeAnswers
from tlt.protocol.events import RolloutCut

PROMPT = PromptIndex(0)


def carried(batch: RolloutBatch) -> dict[PromptIndex, CarriedGroup]:
    _, rest = rollout_batch.split(batch)
    return rest


def test_an_answer_that_waits_in_the_queue_is_not_added_again() -> None:
    turn = Turn(new_run(JOB, small_spec(partial=1.0)), 0.0)
    event = RolloutCut(
        **ORIGIN, prompt=PROMPT, member=Member(1), answer=None, decode_seconds=0.0, excused=0
    )
    opened = rollout_batch.new_batch(Step(0), "train", [PROMPT], [2])
    left = carried(rollout_batch.settle(opened, event))
    for step in (1, 2):
        opened = rollout_batch.new_batch(Step(step), "train", [], [])
        opened = rollout_batch.carry(opened, left, 1, differing=False)
        left = carried(partial_rollouts.resume(turn, opened))
    (command,) = turn.commands
    assert isinstance(command, ResumeAnswers)
    assert [(each.member, each.attempt) for each in command.answers] == [(1, 1)]
