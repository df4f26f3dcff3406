"""A spec names one held-out set or several, and a job may be their evaluation alone."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_config import parse
from tlt.errors import ConfigError
from tlt.spec.data_and_algorithm import EvaluationSet
from tlt.spec.evaluation_job import evaluation_job
from tlt.spec.spec_files import data_files

SETS: dict[str, Any] = {"aime24": {"path": "aime", "answers": 16}, "gsm8k": {"path": "/g.jsonl"}}


def test_reads_several_evaluation_sets() -> None:
    sets = parse(data__eval=SETS).data.evaluation_sets
    assert sets == {
        "aime24": EvaluationSet(path="/specs/aime", answers=16),
        "gsm8k": EvaluationSet(path="/g.jsonl"),
    }
    only = parse(data__eval="eval.jsonl").data.evaluation_sets
    assert only == {"eval": EvaluationSet(path="/specs/eval.jsonl")}
    assert parse().data.evaluation_sets == {}


@pytest.mark.parametrize(
    ("held_out", "complaint"),
    [
        ({}, "data: eval names no set"),
        ({"a/b": {"path": "x"}}, "data: eval: the name of a set may hold letters"),
        ({"a": {"path": "x", "answer": 4}}, "data.eval.a.answer: unknown key; did you mean"),
        ({"a": "x"}, "data.eval.a: Expected `object`, got `str`"),
        ({"a": {"path": "x", "answers": "4"}}, "data.eval.a: answers: Expected `int`, got `str`"),
        ({"a": {}}, "data.eval.a: Object missing required field `path`"),
        ({"a": {"path": "x", "answers": 0}}, "data.eval.a: answers must be at least 1"),
        ({"a": {"path": "x", "limit": 0}}, "data.eval.a: limit must be above 0"),
        ({"a": {"path": "x", "top_k": -1}}, "data.eval.a: top_k must be 0 (off) or more"),
        ({"a": {"path": "x", "top_p": 0}}, "data.eval.a: top_p must lie in (0, 1]"),
        ({"a": {"path": "x", "min_p": 1}}, "data.eval.a: min_p must lie in [0, 1)"),
        (
            {"a": {"path": "x", "answers": 4, "temperature": 0}},
            "data.eval.a: at temperature 0 its 4 answers would be equal",
        ),
    ],
)
def test_refuses_impossible_evaluation_sets(held_out: Any, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(data__eval=held_out)
    assert str(error.value).startswith(f"job.yaml: {complaint}")


def test_greedy_evaluations_allow_one_answer() -> None:
    with pytest.raises(ConfigError, match=r"data.eval.aime24: at temperature 0 its 16 answers"):
        parse(data__eval=SETS, rollout__eval_temperature=0)
    warm = {"aime24": {**SETS["aime24"], "temperature": 0.6}, "gsm8k": SETS["gsm8k"]}
    assert parse(data__eval=warm, rollout__eval_temperature=0).data.eval


def test_refuses_min_p_of_a_set_where_verification_would_ignore_it() -> None:
    held_out = {"a": {"path": "x", "min_p": 0.1}}
    with pytest.raises(ConfigError, match=r"data.eval.a.min_p with speculation needs"):
        parse(speculation__mode="adaptive", rollout__engine="sglang", data__eval=held_out)


def test_a_job_of_no_steps_evaluates() -> None:
    with pytest.raises(ConfigError, match=r"steps 0 only evaluates: set eval_every: 1"):
        parse(algorithm__steps=0)
    spec = parse(algorithm__steps=0, algorithm__eval_every=1, data__eval=SETS)
    assert list(data_files(spec)) == ["data.eval.aime24.path", "data.eval.gsm8k.path"]


def test_makes_a_job_that_only_evaluates(tmp_path: Path) -> None:
    spec = parse(
        data__eval=SETS,
        loggers=["tensorboard"],
        speculation={"mode": "static", "strategy": {"type": "draft", "depth": 4}},
        drafter__train="auto",
    )
    job = evaluation_job(spec, "job.yaml", tmp_path)
    assert (job.algorithm.steps, job.algorithm.eval_every) == (0, 1)
    assert (job.name, job.policy.path, job.data) == ("job-eval", str(tmp_path), spec.data)
    # nobody trains the drafter that it would need
    assert (job.drafter.train, job.speculation.mode, job.loggers) == ("off", "off", ())
    with pytest.raises(ConfigError, match=r"job.yaml: data.eval: an evaluation needs held-out"):
        evaluation_job(parse(), "job.yaml")
