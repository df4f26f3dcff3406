"""The figures of an evaluation are what their definitions say, answers without a reward aside."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.base.id_types import PolicyVersion, Step
from tlt.protocol.shared_values import EvaluationAnswer, SetAnswers
from tlt.report.batch_lengths_and_finish_times import LengthSummary
from tlt.report.evaluation_figures import (
    EvalSummary,
    gain_over,
    majority_vote,
    overall,
    pass_at_k,
    set_figures,
)
from tlt.report.step_metrics import eval_metrics

rewards = st.sampled_from([None, 0.0, 0.5, 1.0, 1.5])


def answer(
    reward: float | None, final: str | None = None, *, length: int = 4, truncated: bool = False
) -> EvaluationAnswer:
    return EvaluationAnswer(
        reward=reward,
        length=length,
        truncated=truncated,
        final=final,
        correct=reward is not None and reward >= 1,
    )


def held_out(*prompts: list[EvaluationAnswer], skipped: int = 0) -> SetAnswers:
    return SetAnswers(name="aime", prompts=tuple(map(tuple, prompts)), skipped=skipped)


@given(solved=st.lists(st.booleans(), min_size=1, max_size=8), data=st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(
    solved: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(solved)))
    draws = [any(drawn) for drawn in combinations(solved, k)]
    assert pass_at_k(len(solved), sum(solved), k) == pytest.approx(sum(draws) / len(draws))


@given(st.lists(st.lists(rewards, min_size=4, max_size=4), min_size=1, max_size=6))
def test_leaves_out_answers_without_a_reward(prompts: list[list[float | None]]) -> None:
    """Each figure is that of the answers that are left, a prompt counting once."""
    figures = set_figures(held_out(*(list(map(answer, each)) for each in prompts)), extracts=True)
    known = [[r for r in each if r is not None] for each in prompts]
    means = [sum(each) / len(each) for each in known if each]
    assert figures.problems == len(means)
    assert figures.unscored == sum(each.count(None) for each in prompts)
    if not means:
        assert (figures.mean, figures.stderr, figures.pass_at) == (0.0, 0.0, {})
        return
    mean = sum(means) / len(means)
    assert figures.mean == pytest.approx(mean)
    if len(means) > 1:
        variance = sum((each - mean) ** 2 for each in means) / (len(means) - 1)
        assert figures.stderr == pytest.approx(math.sqrt(variance / len(means)))
    for k in (1, 2, 4):
        shares = [
            sum(any(r >= 1 for r in drawn) for drawn in combinations(each, k))
            / math.comb(len(each), k)
            for each in known
            if len(each) >= k
        ]
        expected = sum(shares) / len(shares) if shares else None
        assert figures.pass_at.get(k) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(("answers", "ks"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_reports_pass_at_the_powers_of_two_and_at_all_answers(answers: int, ks: list[int]) -> None:
    figures = set_figures(held_out([answer(1.0)] * answers), extracts=True)
    assert list(figures.pass_at) == ks


@pytest.mark.parametrize(
    ("finals", "expected"),
    [
        ([("7", 1.0), ("7", 1.0), ("8", 0.0)], 1.0),
        ([("8", 0.0), ("7", 1.0), ("8", 0.0)], 0.0),
        # two classes are as frequent, and one of them is right
        ([("7", 1.0), ("8", 0.0)], 0.5),
        ([("7", 1.0), ("8", 0.0), ("9", 0.0)], 1 / 3),
        # those without a final answer or a reward don't vote
        ([(None, 0.0), (None, 0.0), ("7", 1.0)], 1.0),
        ([("8", None), ("8", None), ("7", 1.0)], 1.0),
        ([(None, 0.0)], 0.0),
    ],
)
def test_the_most_frequent_final_answer_decides(
    finals: list[tuple[str | None, float | None]], expected: float
) -> None:
    assert majority_vote([answer(reward, final) for final, reward in finals]) == pytest.approx(
        expected
    )


def test_right_answers_count_whatever_their_rewards_add_up_to() -> None:
    brief = EvaluationAnswer(reward=1.2, length=4, truncated=False, final="8", correct=False)
    right = EvaluationAnswer(reward=0.9, length=4, truncated=False, final="7", correct=True)
    figures = set_figures(held_out([brief, right, right]), extracts=True)
    assert figures.pass_at[1] == pytest.approx(2 / 3)
    assert figures.majority == 1.0
    assert figures.mean == pytest.approx(1.0)


def test_reports_no_majority_where_it_would_mean_nothing() -> None:
    four = held_out([answer(1.0, "7")] * 4)
    assert set_figures(four, extracts=True).majority == 1.0
    assert set_figures(four, extracts=False).majority is None
    assert set_figures(held_out([answer(1.0, "7")]), extracts=True).majority is None


def test_counts_what_was_cut_off_dropped_and_skipped() -> None:
    cut = answer(0.0, length=9, truncated=True)
    dropped = answer(None, length=0)
    figures = set_figures(held_out([cut, answer(1.0)], [dropped, cut], skipped=3), extracts=True)
    assert (figures.truncated, figures.unscored, figures.skipped) == (0.5, 1, 3)
    assert (figures.length.mean, figures.length.max) == (pytest.approx(22 / 3), 9)
    assert figures.describe() == "avg@2 0.250 ± 0.250, pass@2 1.000, maj@2 0.000 on 2 problems"


def test_loggers_get_the_figures_of_each_set() -> None:
    four = [answer(1.0, "7"), answer(0.0, "8"), answer(1.0, "7"), answer(None)]
    sets = (
        set_figures(held_out(four, [answer(0.0)] * 4), extracts=True),
        set_figures(SetAnswers(name="gsm8k", prompts=((answer(1.0),),)), extracts=True),
    )
    means = {"aime": (2 / 3, 0.0), "gsm8k": (1.0,)}
    mean, stderr = overall(sets, means)
    assert (mean, stderr) == (pytest.approx(2 / 3), pytest.approx(1 / 6))
    summary = EvalSummary(
        step=Step(2),
        version=PolicyVersion(2),
        mean=mean,
        stderr=stderr,
        problems=3,
        length=LengthSummary(),
        seconds=1.0,
        sets=sets,
        gain=gain_over({"aime": (0.0, 0.0), "gsm8k": (1.0,)}, means),
    )
    figures = eval_metrics(summary)
    assert figures["eval/aime/avg@4"] == pytest.approx(1 / 3)
    assert figures["eval/aime/maj@4"] == 0.5
    assert {name for name in figures if "pass@" in name} == {
        *(f"eval/aime/pass@{k}" for k in (1, 2, 4)),
        "eval/gsm8k/pass@1",
    }
    assert figures["eval/aime/pass@4"] == 0.0  # the other prompt has three answers with a reward
    assert figures["eval/aime/without_reward"] == 1
    # a set of one prompt has no interval
    assert figures["eval/gain"] == pytest.approx(1 / 6)
    assert "eval/gain_low" not in figures


def test_a_gain_has_its_interval() -> None:
    gain = gain_over({"aime": (0.0, 0.0, 1.0, 0.0)}, {"aime": (1.0, 1.0, 1.0, 0.0)})
    assert gain is not None
    # the mean of 1, 1, 0 and 0, and Student's t of three degrees
    assert gain.low == pytest.approx(0.5 - 3.182 * math.sqrt(1 / 12), abs=0.01)
    assert gain.describe().startswith("+50.0 points (95 %: -41.")
