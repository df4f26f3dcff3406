"""Groups that agree teach nothing, but they keep the scale of an update and its anchor."""

from typing import Any

import msgspec
import pytest

from tests.samples import ANSWER_REF
from tests.simulation.specs import small_spec
from tlt.base.id_types import Attempt, PromptIndex, Step
from tlt.policies.algorithm.advantages import agree
from tlt.policies.algorithm.sample_sharding import count_teaching_groups
from tlt.policies.run.policy_updates import count_minibatches, plan_update
from tlt.policies.run.rollout_batch import Answer, Group, RolloutBatch, Score
from tlt.spec.config import JobSpec

FIRST = Attempt(0)


def answer(reward: float, length: int = 5) -> Answer:
    score = Score(FIRST, reward)
    return Answer(finished=FIRST, length=length, scores=(score,), ref=ANSWER_REF)


def batch(*groups: list[float]) -> RolloutBatch:
    return RolloutBatch(
        step=Step(0),
        purpose="train",
        groups={
            PromptIndex(number): Group(members=tuple(map(answer, rewards)))
            for number, rewards in enumerate(groups)
        },
        unsettled=0,
    )


def spec(**algorithm: Any) -> JobSpec:
    made = small_spec()
    return msgspec.structs.replace(
        made, algorithm=msgspec.structs.replace(made.algorithm, **algorithm)
    )


def test_one_answer_that_differs_among_many_is_no_agreement() -> None:
    assert agree([0.1] * 64)
    assert not agree([0.0] * 63 + [1.0])
    assert not agree([0.5] * 7 + [0.5 + 1e-6])


def test_a_group_that_agrees_is_silent() -> None:
    plan = plan_update(batch([1.0, 0.0], [1.0, 1.0]), spec())
    assert [(s.prompt, s.member) for s in plan.samples] == [(0, 0), (0, 1)]
    assert [(s.prompt, s.member, s.advantage) for s in plan.silent] == [(1, 0, 0.0), (1, 1, 0.0)]


def test_a_group_that_agrees_is_anchored_by_the_penalty() -> None:
    plan = plan_update(batch([1.0, 0.0], [1.0, 1.0]), spec(kl_coefficient=0.1))
    assert [(s.prompt, s.advantage) for s in plan.samples if s.prompt == 1] == [(1, 0.0)] * 2
    assert plan.silent == ()


def test_dynamic_sampling_leaves_out_groups_that_agree() -> None:
    changed = spec(dynamic_sampling=True, kl_coefficient=0.1)
    plan = plan_update(batch([1.0, 0.0], [1.0, 1.0]), changed)
    assert {sample.prompt for sample in plan.samples} == {0}
    assert plan.silent == ()


def test_an_answer_that_is_wrong_and_long_makes_no_difference_to_dynamic_sampling() -> None:
    long = Answer(
        finished=FIRST,
        length=9,
        scores=(Score(FIRST, -0.01, unpenalised=0.0),),
        ref=ANSWER_REF,
    )
    wrong = Group((*(answer(0.0) for _ in range(15)), long))
    made = batch([1.0, 0.0])
    made = msgspec.structs.replace(made, groups={**made.groups, PromptIndex(1): wrong})
    assert {s.prompt for s in plan_update(made, spec(dynamic_sampling=True)).samples} == {0}
    # otherwise its length counts
    of_long = plan_update(made, spec()).samples[-1]
    assert (of_long.prompt, of_long.advantage) == (1, pytest.approx(-3.75, abs=0.01))


@pytest.mark.parametrize(("differing", "minibatches"), [(4, 4), (3, 3), (1, 1), (0, 1)])
def test_dynamic_sampling_keeps_the_size_of_minibatches(differing: int, minibatches: int) -> None:
    made = batch(*[[1.0, 0.0]] * differing, *[[1.0, 1.0]] * (4 - differing))
    changed = spec(dynamic_sampling=True, minibatches=4, prompts_per_step=4)
    assert count_minibatches(plan_update(made, changed), changed.algorithm) == minibatches


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"advantage": "batch", "kl_in": "reward", "kl_coefficient": 0.1},
        {"advantage": "own.py:advantage"},
    ],
)
def test_groups_teach_by_their_rewards_where_ranks_compute_advantages(
    algorithm: dict[str, Any],
) -> None:
    plan = plan_update(batch([1.0, 0.0], [1.0, 1.0], [0.5, 0.2]), spec(**algorithm))
    assert count_teaching_groups(plan.samples) == 2


def test_answers_that_were_cut_off_are_compared_but_not_learned_from() -> None:
    made = batch([1.0, 0.0, 0.5])
    (group,) = made.groups.values()
    cut = Group((*group.members[:2], msgspec.structs.replace(group.members[2], truncated=True)))
    made = msgspec.structs.replace(made, groups={PromptIndex(0): cut})
    every = plan_update(made, spec()).samples
    masked = plan_update(made, spec(mask_truncated=True)).samples
    assert len(every) == 3
    assert masked == every[:2]


def test_without_any_advantage_nothing_is_updated() -> None:
    plan = plan_update(batch([1.0, 1.0], [0.0, 0.0]), spec())
    assert plan.samples == plan.silent == ()


def test_a_prompt_is_solved_if_its_answers_are_right_whatever_their_rewards() -> None:
    long = Score(FIRST, 0.8, unpenalised=1.0, correct=True)
    brief = Score(FIRST, 1.2, correct=False)
    # of a journal that doesn't say
    unknown = Score(FIRST, 1.0)
    for scores, solved in (((long, unknown), True), ((long, brief), False)):
        members = (Answer(finished=FIRST, length=5, scores=(score,)) for score in scores)
        assert Group(tuple(members)).solved is solved
