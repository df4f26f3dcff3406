"""An answer that was lost is left out, so that no rollout batch waits for it."""

from pathlib import Path

import msgspec
import pytest

from tests.samples import JOB, SPEC, answer, written_answer
from tlt.actors.reward.reward_scorer import JobScorer
from tlt.base.id_types import PromptIndex
from tlt.blobs.answer_files import AnswerFiles
from tlt.data.dataset import Prompt, Prompts, prompt_of, prompts_file
from tlt.rewards.process.weighted_rewards import WeightedRewards
from tlt.spec.config import DataSpec
from tlt.spec.data_and_algorithm import EvaluationSet
from tlt.spec.environment import EnvironmentSpec
from tlt.spec.reward import RewardSpec
from tlt.store.job_requests import new_record


async def test_scores_an_answer_and_leaves_a_lost_one_out(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(SPEC, reward=RewardSpec(kind="numeric"))
    row = Prompt(tokens=(1, 2), answer="7", row={})
    Prompts.write(prompts_file(tmp_path, "train"), [row] * 8)
    written = AnswerFiles(tmp_path).writer("3.0").append(written_answer([7], text="#### 7"))
    whole = msgspec.structs.replace(answer(0), answer=written)
    scorer = JobScorer(new_record(JOB, spec, str(tmp_path)))
    try:
        scored = await scorer.score(whole)
        (tmp_path / "answers" / "3.0").unlink()
        lost = await scorer.score(whole)
    finally:
        await scorer.close()
    assert (scored.reward, scored.error) == (1.0, None)
    assert lost.reward is None
    assert lost.error is not None
    assert "cannot be read" in lost.error


async def test_a_function_gets_what_it_asks_for_and_long_answers_get_less(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def reward(completion, answer, row, tokens, stop):\n"
        "    return sum(tokens) + (100 if stop == 'length' else 0)\n"
    )
    reward = RewardSpec(
        kind="function",
        function=f"{tmp_path}/own.py:reward",
    )
    algorithm = msgspec.structs.replace(SPEC.algorithm, overlong_tokens=10, overlong_penalty=4.0)
    rollout = msgspec.structs.replace(SPEC.rollout, max_new_tokens=20)
    spec = msgspec.structs.replace(SPEC, reward=reward, rollout=rollout, algorithm=algorithm)
    for purpose in ("train", "eval"):
        prompt = Prompt(tokens=(1, 2), answer="7", row={})
        Prompts.write(prompts_file(tmp_path, purpose), [prompt] * 8)
    written = AnswerFiles(tmp_path).writer("3.0").append(written_answer([7, 8], text="78"))
    cut = msgspec.structs.replace(answer(0), answer=written, length=15, stop="length")
    scorer = JobScorer(new_record(JOB, spec, str(tmp_path)))
    try:
        trained = await scorer.score(cut)
        evaluated = await scorer.score(msgspec.structs.replace(cut, purpose="eval"))
    finally:
        await scorer.close()
    assert (trained.reward, trained.unpenalised, trained.error) == (113.0, 115.0, None)
    assert (evaluated.reward, evaluated.unpenalised) == (115.0, None)


async def test_the_penalty_for_length_ends_where_the_context_does(tmp_path: Path) -> None:
    algorithm = msgspec.structs.replace(SPEC.algorithm, overlong_tokens=4, overlong_penalty=1.0)
    spec = msgspec.structs.replace(SPEC, algorithm=algorithm)
    prompts = [Prompt(tokens=(1, 2), answer="7", row={}, room=room) for room in (8, 10_000)]
    Prompts.write(prompts_file(tmp_path, "train"), prompts)
    written = AnswerFiles(tmp_path).writer("3.0").append(written_answer([7] * 8, text="7"))
    cut = msgspec.structs.replace(answer(0), answer=written, length=8, stop="length")
    scorer = JobScorer(new_record(JOB, spec, str(tmp_path)))
    try:
        scored = [
            await scorer.score(msgspec.structs.replace(cut, prompt=PromptIndex(index)))
            for index in range(2)
        ]
    finally:
        await scorer.close()
    assert [(each.reward, each.correct) for each in scored] == [(0.0, True), (1.0, True)]


async def test_an_answer_that_goes_on_with_a_thought_needs_its_end(tmp_path: Path) -> None:
    prompts = [Prompt(tokens=(1, 2), answer="7", row={}, in_thought=i == 0) for i in range(2)]
    Prompts.write(prompts_file(tmp_path, "eval"), prompts)
    written = AnswerFiles(tmp_path).writer("3.0").append(written_answer([7], text="perhaps 7"))
    asked = msgspec.structs.replace(answer(0), answer=written, purpose="eval")
    scorer = JobScorer(new_record(JOB, SPEC, str(tmp_path)))
    try:
        scored = [
            await scorer.score(msgspec.structs.replace(asked, prompt=PromptIndex(index)))
            for index in range(2)
        ]
    finally:
        await scorer.close()
    assert [(each.reward, each.final) for each in scored] == [(0.0, None), (1.0, "7.0")]


async def test_scores_by_the_names_of_the_row_and_reports_its_source(tmp_path: Path) -> None:
    data = DataSpec(train="rows.jsonl", source_key="of")
    missing = RewardSpec(kind="function", function="no.such:name", sources=("taco",))
    rewards = (RewardSpec(kind="numeric", sources=("gsm8k",)), missing)
    spec = msgspec.structs.replace(SPEC, data=data, reward=rewards)
    row = Prompt(tokens=(1, 2), answer="7", row={}, sources=("rows", "gsm8k"))
    Prompts.write(prompts_file(tmp_path, "train"), [row] * 8)
    written = AnswerFiles(tmp_path).writer("3.0").append(written_answer([7], text="#### 7"))
    scorer = JobScorer(new_record(JOB, spec, str(tmp_path)))
    try:
        scored = await scorer.score(msgspec.structs.replace(answer(0), answer=written))
    finally:
        await scorer.close()
    assert (scored.reward, scored.error, scored.parts) == (1.0, None, (1.0, None))
    assert scored.source == "gsm8k"


async def test_an_answer_that_ends_its_scoring_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise KeyError("question")

    Prompts.write(prompts_file(tmp_path, "train"), [Prompt(tokens=(1, 2), answer="7", row={})] * 8)
    written = AnswerFiles(tmp_path).writer("3.0").append(written_answer([7], text="#### 7"))
    scorer = JobScorer(new_record(JOB, SPEC, str(tmp_path)))
    monkeypatch.setattr(WeightedRewards, "score", fail)
    try:
        scored = await scorer.score(msgspec.structs.replace(answer(0), answer=written))
    finally:
        await scorer.close()
    assert (scored.reward, scored.error) == (None, "KeyError: 'question'")


def test_an_evaluation_set_may_have_a_column_of_its_own() -> None:
    held_out = EvaluationSet(path="other.jsonl", prompt_key="problem")
    data = DataSpec(train="rows.jsonl", eval={"other": held_out}, prompt_key="question")
    row = {"problem": "1 + 1", "question": "2 + 2"}
    assert prompt_of(Prompt(tokens=(1,), answer="2", row=row, set="other"), data) == "1 + 1"
    assert prompt_of(Prompt(tokens=(1,), answer="2", row=row), data) == "2 + 2"


async def test_an_environment_s_reward_is_in_the_answer(tmp_path: Path) -> None:
    """An answer that it fails to judge is left out or gets a fallback, for other rewards, too."""
    environment = EnvironmentSpec(factory="world.py:World")
    judge = RewardSpec(kind="environment")
    fallback = RewardSpec(kind="environment", on_error=-1.0)
    Prompts.write(prompts_file(tmp_path, "train"), [Prompt(tokens=(1, 2), answer="7", row={})] * 8)
    files = AnswerFiles(tmp_path).writer("3.0")
    said = written_answer([7], text="7")
    judged = files.append(msgspec.structs.replace(said, reward=0.5))
    failed = files.append(msgspec.structs.replace(said, error="KeyError: 'x'"))
    found: list[tuple[float | None, str | None]] = []
    for rewards in ((judge,), (fallback,), (RewardSpec(kind="numeric"),)):
        spec = msgspec.structs.replace(SPEC, reward=rewards, environment=environment)
        scorer = JobScorer(new_record(JOB, spec, str(tmp_path)))
        try:
            for ref in (judged, failed):
                scored = await scorer.score(msgspec.structs.replace(answer(0), answer=ref))
                found.append((scored.reward, scored.error))
        finally:
            await scorer.close()
    error = "KeyError: 'x'"
    assert found[:2] == [(0.5, None), (None, error)]
    assert found[2:4] == [(0.5, None), (-1.0, error)]
    assert found[4:] == [(1.0, None), (None, error)]
