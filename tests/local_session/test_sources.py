"""Data in verl's layout trains as it is, and each answer is scored by the rewards of its source."""

import json
import shutil
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest

from tests.local_session.conftest import POLICY
from tests.local_session.session import LocalSession, changed
from tests.verl_rows import code_row, gsm8k_row, math_row, write_parquet
from tlt.actors.reward import reward_scorer
from tlt.base.id_types import PromptIndex, Purpose
from tlt.blobs.answer_files import AnswerFiles
from tlt.data.dataset import Prompt, Prompts, prompts_file
from tlt.protocol.events import RolloutFinished, RolloutScored
from tlt.rewards.process.weighted_rewards import WeightedRewards
from tlt.runs.run_answers import read_answers
from tlt.spec.config import JobSpec
from tlt.spec.data_and_algorithm import EvaluationSet, SourceSpec
from tlt.spec.reward import RewardSpec

# answers are digits 0 and 1: as a program they print nothing, and some aren't Python
TESTS = {"inputs": ["3\n"], "outputs": [""]}
REWARDS = (
    RewardSpec(kind="numeric", name="numbers", sources=("sums", "openai/gsm8k")),
    RewardSpec(kind="math", sources=("numina_olympiads",)),
    RewardSpec(kind="code", sources=("taco",)),
    RewardSpec(kind="regex", pattern="(.)$", name="last", sources=("sums",), weight=0.5),
)
# by the source: the rewards that score its answers
SCORED_BY = {
    "openai/gsm8k": {"numbers"},
    "numina_olympiads": {"math"},
    "taco": {"code"},
    "sums": {"numbers", "last"},
}


@pytest.fixture(autouse=True)
def _real_rewards(_without_processes_of_seconds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Score in processes of their own, where programs are confined."""
    monkeypatch.setattr(reward_scorer, "WeightedRewards", WeightedRewards)


@pytest.fixture
def spec(spec: JobSpec, short_folder: Path) -> JobSpec:
    """Return a job with a file that mixes three sources, and a file of another layout."""
    policy = short_folder / "policy"
    shutil.copytree(POLICY, policy)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (policy / "chat_template.jinja").write_text(template)
    mixed = [
        row
        for n in range(4)
        for row in (
            gsm8k_row(n, f"{n}+1?", f"It is {n + 1}.\n#### 1,011"),
            math_row(n, f"Find {n} in binary.", "101"),
            code_row(n, "Print nothing.", TESTS),
        )
    ]
    held_out = [gsm8k_row(n, f"{n}+2?", "#### 11", "test") for n in range(2)]
    held_out.append(code_row(9, "Print nothing at all.", TESTS))
    sums = short_folder / "sums.jsonl"
    lines = [json.dumps({"question": f"{n}+0=", "target": n % 2}) + "\n" for n in range(4)]
    sums.write_text("".join(lines))
    plain = {"path": str(sums), "prompt_key": "question", "answer_key": "target"}
    mixture = changed(
        spec,
        policy={"path": str(policy)},
        data={
            "train": (
                SourceSpec(path=write_parquet(short_folder / "verl.parquet", mixed), weight=3),
                SourceSpec(**plain),
            ),
            "eval": {
                "verl": EvaluationSet(path=write_parquet(short_folder / "test.parquet", held_out)),
                "sums": EvaluationSet(**plain),
            },
            "eval_limit": None,
            "answer_key": "reward_model.ground_truth",
            "source_key": "data_source",
            "chat_template": True,
        },
        algorithm={"steps": 2, "prompts_per_step": 8, "group_size": 2, "eval_every": 2},
        rollout={"max_new_tokens": 6},
    )
    return msgspec.structs.replace(mixture, reward=REWARDS)


def _prompts(run: Path, purpose: Purpose) -> list[Prompt]:
    prompts = Prompts(prompts_file(run, purpose))
    try:
        return [prompts[PromptIndex(index)] for index in range(len(prompts))]
    finally:
        prompts.close()


def _source(prompt: Prompt) -> str:
    return prompt.row.get("data_source") or "sums"


def _is_python(text: str) -> bool:
    return text.lstrip("0") == text or not text.strip("0")


async def test_each_answer_is_scored_by_the_rewards_of_its_source(
    session: LocalSession, spec: JobSpec
) -> None:
    await session.all_up()
    job = await session.submit(spec)
    snapshot = await session.done(job)
    run = session.run(job)
    prompts = {purpose: _prompts(run, purpose) for purpose in ("train", "eval")}
    scored: list[RolloutScored] = session.events(job, RolloutScored)
    assert len(scored) == 2 * 8 * 2 + 2 * (3 + 4)
    texts = {
        (event.step, event.purpose, event.prompt, event.member): AnswerFiles(run).read(event.answer)
        for event in session.events(job, RolloutFinished)
    }
    seen: defaultdict[str, set[str]] = defaultdict(set)
    for event in scored:
        prompt = prompts[event.purpose][event.prompt]
        source, text = _source(prompt), texts[event.step, event.purpose, event.prompt, event.member]
        seen[source].add(event.purpose)
        parts = dict(zip([reward.label for reward in REWARDS], event.parts, strict=True))
        assert event.error is None
        assert {name for name, part in parts.items() if part is not None} == SCORED_BY[source]
        if source == "taco":
            assert parts["code"] == event.reward == _is_python(text.text)
        if source == "openai/gsm8k":
            assert event.reward == (int(text.text) == int(prompt.answer))
        assert event.source == source
    assert seen == {
        "openai/gsm8k": {"train", "eval"},
        "numina_olympiads": {"train"},
        "taco": {"train", "eval"},
        "sums": {"train", "eval"},
    }
    assert {name for step in snapshot.steps for name in step.reward_sources} == set(SCORED_BY)
    assert {name for step in snapshot.steps for name in step.reward_parts} == {
        reward.label for reward in REWARDS
    }
    assert {event.reward for event in scored if event.source == "taco"} == {0.0, 1.0}


async def test_shows_the_question_and_the_answer_of_nested_columns(
    session: LocalSession, spec: JobSpec
) -> None:
    job = await session.submit(spec)
    await session.done(job)
    rows = list(read_answers(session.run(job), "eval"))
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    assert rows[0].question == f"user: 0+2? {instruction}"
    assert (rows[0].right, rows[0].set) == ("11", "verl")
    assert (rows[-1].question, rows[-1].right, rows[-1].set) == ("3+0=", "1", "sums")


async def test_a_source_that_no_reward_scores_is_refused(
    session: LocalSession, spec: JobSpec
) -> None:
    record = await session.ended(
        await session.submit(msgspec.structs.replace(spec, reward=(*REWARDS[:2], REWARDS[3])))
    )
    assert record.status == "failed"
    assert "verl.parquet: row 3: no reward scores 'taco'" in str(record.error)
