"""An answer without a reward is settled like others, and counts in nothing."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties.test_keeping_answers import started
from tests.properties.test_update_plan import spec
from tests.samples import ANSWER_REF
from tests.simulation.specs import small_spec
from tests.simulation.walk import finish, step
from tests.simulation.worker_events import reward_or_none
from tests.simulation.world import World
from tlt.base.id_types import Attempt, PromptIndex, Step
from tlt.policies.run import phase_transitions
from tlt.policies.run.policy_updates import plan_update
from tlt.policies.run.rollout_batch import Answer, Group, RolloutBatch, Score
from tlt.policies.run.run_state import Turn
from tlt.protocol.commands import EndJob, RecordRolloutBatch

FIRST = Attempt(0)
Parts = tuple[float | None, ...]


def answer(reward: float | None, parts: Parts = ()) -> Answer:
    score = Score(FIRST, reward, parts)
    return Answer(finished=FIRST, length=5, scores=(score,), ref=ANSWER_REF)


def batch(*answers: Answer) -> RolloutBatch:
    groups = {PromptIndex(0): Group(answers)}
    return RolloutBatch(step=Step(0), purpose="train", groups=groups, unsettled=0)


def test_it_is_settled_and_counts_in_no_mean() -> None:
    left_out = answer(None, (1.0, None))
    assert left_out.settled
    made = batch(answer(1.0, (1.0, 2.0)), left_out, answer(0.0, (0.0, 4.0)))
    assert made.rewards() == [1.0, 0.0]
    assert made.mean_parts(["right", "brief"]) == {
        "right": pytest.approx(2 / 3),
        "brief": pytest.approx(3.0),
    }


def test_measures_of_environments_are_means_of_those_who_have_them() -> None:
    measured = (Score(FIRST, 1.0, measured=each) for each in ({"a": 1.0}, {"a": 2.0, "b": 5.0}))
    made = batch(*(msgspec.structs.replace(answer(1.0), scores=(each,)) for each in measured))
    assert made.mean_measured() == {"a": 1.5, "b": 5.0}


def test_it_waits_for_the_score_of_the_attempt_that_finished() -> None:
    other = Answer(finished=Attempt(1), length=5, scores=(Score(FIRST, 1.0),))
    assert not other.settled


def test_its_group_is_compared_without_it() -> None:
    plan = plan_update(batch(answer(1.0), answer(None), answer(0.0)), spec())
    assert [sample.member for sample in plan.samples] == [0, 2]
    assert sum(sample.advantage for sample in plan.samples) == pytest.approx(0.0)


@pytest.mark.parametrize("dynamic_sampling", [False, True])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=max(5, settings().max_examples // 5))
def test_jobs_end_whichever_answers_are_left_out(dynamic_sampling: bool, seed: int) -> None:
    """Enough answers and attempts, so that no batch is without any reward."""
    sizes = small_spec(prompts=2, group=3, max_tries=100, dynamic_sampling=dynamic_sampling)
    chooser, world = Random(seed), World(sizes, [1, 1], reward=reward_or_none)
    for _ in range(200):
        if not world.ended:
            step(world, chooser, faults=0.05, overtaking=0.3)
    finish(world)


@pytest.mark.parametrize(
    ("rewards", "fails"), [((None, None), True), ((None, 1.0), False), ((0.0, 0.0), False)]
)
def test_a_step_of_which_nothing_is_scored_fails_the_job(
    rewards: tuple[float | None, ...], fails: bool
) -> None:
    state = started("off")[0]
    state = msgspec.structs.replace(state, batch=batch(*map(answer, rewards)))
    turn = Turn(state, 0.0)
    phase_transitions.close_batch(turn)
    (record,) = [c for c in turn.commands if isinstance(c, RecordRolloutBatch)]
    assert record.rewards == tuple(r for r in rewards if r is not None)
    ended = [command for command in turn.commands if isinstance(command, EndJob)]
    assert [command.status for command in ended] == (["failed"] if fails else [])
    if fails:
        assert "no answer of step 0 could be scored" in (ended[0].error or "")
