"""Evaluations are sampled as the spec says for them, not as training's answers are."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.ranks.members import decoding_of
from tests.ranks.ranks import local_rank, open_job, with_policy
from tests.samples import JOB, SPEC, prompt
from tlt.blobs.answer_files import AnswerFiles
from tlt.engine.base import Sampling
from tlt.protocol.commands import PromptIssued
from tlt.protocol.rank_messages import DecodePrompts
from tlt.ranks.request_settings import sampling
from tlt.spec.config import RolloutSpec
from tlt.spec.data_and_algorithm import EvaluationSet

TRAINED: dict[str, Any] = {"temperature": 0.8, "top_k": 5, "top_p": 0.5, "min_p": 0.1}
OWN = EvaluationSet(path="x", temperature=0.6, top_k=20, top_p=0.95, min_p=0.01)


def held_out(name: str) -> PromptIssued:
    return msgspec.structs.replace(prompt(7), purpose="eval", set=name)


@pytest.mark.parametrize(
    ("rollout", "issued", "expected"),
    [
        ({}, prompt(7), Sampling(**TRAINED)),
        ({}, held_out("plain"), Sampling()),
        (
            {"eval_temperature": 0.0, "eval_top_k": 3, "eval_top_p": 0.9, "eval_min_p": 0.2},
            held_out("plain"),
            Sampling(temperature=0.0, top_k=3, top_p=0.9, min_p=0.2),
        ),
        (
            {"eval_top_k": 3, "eval_top_p": 0.9, "eval_min_p": 0.2},
            held_out("own"),
            Sampling(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01),
        ),
        ({"eval_top_k": 3}, held_out("all"), Sampling(top_k=0)),
    ],
)
def test_evaluations_have_a_sampling_of_their_own(
    rollout: dict[str, Any], issued: PromptIssued, expected: Sampling
) -> None:
    sets = {"plain": EvaluationSet(path="x"), "own": OWN, "all": EvaluationSet(path="x", top_k=0)}
    spec = msgspec.structs.replace(
        SPEC,
        data=msgspec.structs.replace(SPEC.data, eval=sets),
        rollout=RolloutSpec(**TRAINED, **rollout),
        algorithm=msgspec.structs.replace(SPEC.algorithm, allow_filtered_sampling=True),
    )
    assert sampling(spec, issued) == expected


def test_a_greedy_evaluation_stays_greedy_with_filters(tmp_path: Path) -> None:
    answers: list[list[int]] = []
    for filters in ({}, {"eval_top_k": 20, "eval_top_p": 0.95, "eval_min_p": 0.01}):
        folder = tmp_path / str(len(answers))
        rollout = RolloutSpec(max_new_tokens=12, slots=4, eval_temperature=0.0, **filters)
        with local_rank(folder) as local:
            local.rank.handle(open_job(folder, with_policy(tmp_path, rollout=rollout)))
            local.rank.handle(DecodePrompts(job=JOB, prompts=(held_out("eval"),)))
            finished = []
            while not finished:
                finished = decoding_of(local.rank).rollout.step()
        answers.append(AnswerFiles(folder).read(finished[0].answer).tokens)
    assert answers[0] == answers[1]
