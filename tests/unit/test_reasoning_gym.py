"""Rows of reasoning-gym's tasks are made from a source alone, and scored as their tasks score."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from tlt.data.dataset import Row, read_rows, rows
from tlt.errors import ConfigError, DataError
from tlt.rewards.process.reward_pool import RewardPool
from tlt.rewards.reward_messages import ScoreResult
from tlt.spec.config import DataSpec
from tlt.spec.data_and_algorithm import SourceSpec
from tlt.spec.prompt_files import train_files
from tlt.spec.reward import RewardSpec

SUMS = "reasoning_gym:chain_sum?min_digits=1&max_digits=2&min_terms=2&max_terms=2&seed=1&size=5"
GYM = RewardSpec(kind="reasoning_gym", timeout_seconds=60)


def read(source: str) -> list[Row]:
    """Return the rows as the reward gets them."""
    made = [row for _, row in read_rows(source)]
    return msgspec.json.decode(msgspec.json.encode(made))


def test_a_spec_needs_no_names_of_columns() -> None:
    (file,) = train_files(DataSpec(train=SUMS))
    made = list(rows(file))
    assert [location for location, _ in made] == [f"{SUMS}: row {n}" for n in range(1, 6)]
    assert all(row["prompt"] == row["question"] and row["answer"] for _, row in made)
    assert [row for _, row in made] == [row for _, row in rows(file)]


def test_parameters_have_the_types_of_the_task() -> None:
    (row,) = read('reasoning_gym:basic_arithmetic?seed=3&size=1&operators=["-"]&min_terms=3')
    assert row["question"].count("-") >= 2
    (row,) = read("reasoning_gym:chain_sum?allow_negation=true&seed=2&size=1")
    assert row["metadata"]["source_dataset"] == "chain_sum"


def test_a_source_has_the_name_of_its_task() -> None:
    assert SourceSpec(path=SUMS).label == "chain_sum"
    assert SourceSpec(path="hf://owner/name?split=test").label == "name"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("chain_sums?seed=1", "no task 'chain_sums'; did you mean 'chain_sum'?"),
        ("chain_sum?seed=1&max_term=2", "no parameter 'max_term'; did you mean 'max_terms'?"),
        ("chain_sum?seed=1&max_terms=two", "max_terms=two: Expected `int`, got `str`"),
        ("chain_sum?seed=1&max_terms=1", "max_terms must be >= min_terms"),
        ("chain_sum?seed=1&seed=2", "'seed' is there twice"),
        ("chain_sum?size=3", "name a seed, such as seed=1"),
    ],
)
def test_names_what_is_wrong_with_a_source(source: str, complaint: str) -> None:
    with pytest.raises(DataError) as error:
        list(read_rows(f"reasoning_gym:{source}"))
    assert str(error.value).startswith(f"reasoning_gym:{source}: {complaint}")


def test_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match="pip install 'tlt-rl\\[reasoning-gym\\]'"):
        list(read_rows("reasoning_gym:gcd?seed=1"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RewardPool]:
    pool = RewardPool(GYM, tmp_path_factory.mktemp("gym") / "log", 1)
    yield pool
    await pool.stop()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "task",
    # numbers, words, sets of words, a grid whose pixels are in tuples, and numpy's types
    ["chain_sum", "spell_backward", "group_anagrams", "rearc", "knights_knaves", "word_ladder"],
)
async def test_gives_a_tasks_own_answer_the_whole_reward(pool: RewardPool, task: str) -> None:
    for row in read(f"reasoning_gym:{task}?seed=7&size=2"):
        said = f"<think>#</think>So <answer>0</answer>, no:\n<answer>{row['answer']}</answer>"
        assert await pool.score(said, row["answer"], row) == ScoreResult(reward=1.0)
        assert await pool.score(row["answer"], row["answer"], row) == ScoreResult(reward=1.0)
        result = await pool.score("<answer>?</answer>", row["answer"], row)
        assert result.error is None
        assert result.reward is not None
        assert result.reward < 1


@pytest.mark.asyncio(loop_scope="module")
async def test_asks_a_tasks_rules_where_several_answers_are_right(pool: RewardPool) -> None:
    (row,) = read('reasoning_gym:composite?seed=4&size=1&datasets=[{"name":"countdown",'
                  '"weight":1,"config":{"min_numbers":2,"max_numbers":2}}]')  # fmt: skip
    found = row["metadata"]["expression"]
    assert await pool.score(found, None, row) == ScoreResult(reward=1.0)
    assert await pool.score(f"({found}) * 1 + 0", None, row) != ScoreResult(reward=1.0)
    (row,) = read("reasoning_gym:rubiks_cube?seed=1&size=1")
    assert row["answer"] is None
    solution = row["metadata"]["example_correct_answer"]
    assert await pool.score(solution, None, row) == ScoreResult(reward=1.0)


@pytest.mark.asyncio(loop_scope="module")
async def test_keeps_partial_credit_and_says_what_was_stated(pool: RewardPool) -> None:
    (row, *_) = read(SUMS)
    assert row["answer"] == "3"
    scored = [
        await pool.score(text, "3", row, extract=True)
        for text in ("+3.0", "It is <answer> 3 </answer>.", "It is 3", "<think>3")
    ]
    assert scored == [
        ScoreResult(reward=1.0, final="+3.0"),
        ScoreResult(reward=1.0, final="3"),
        ScoreResult(reward=1 / len("It is 3"), final="It is 3"),
        ScoreResult(reward=0.0),
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_scores_rows_that_were_exported(pool: RewardPool) -> None:
    (row, *_) = read(SUMS)
    exported = {name: row[name] for name in ("question", "answer", "metadata")}
    assert await pool.score("3", "3", exported) == ScoreResult(reward=1.0)
    result = await pool.score("3", "3", {"answer": "3"})
    assert result.error is not None
    assert "metadata.source_dataset" in result.error


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_that_is_evaluated_reads_and_writes_no_files(
    pool: RewardPool, tmp_path: Path
) -> None:
    """The task string_insertion evaluates answers in brackets."""
    (row,) = read("reasoning_gym:string_insertion?seed=1&size=1")
    letters = ", ".join(map(repr, row["answer"]))
    assert await pool.score(f"[{letters}]", None, row) != ScoreResult(reward=1.0)
    target = tmp_path / "written"
    await pool.score(f"[str(open({str(target)!r}, 'w').write('x'))]", None, row)
    assert not target.exists()


async def test_refuses_to_start_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = tmp_path / "reasoning_gym.py"
    hidden.write_text("raise ImportError('none here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = RewardPool(GYM, tmp_path / "log", 1)
    with pytest.raises(ConfigError, match="reasoning_gym: this needs reasoning-gym"):
        await pool.start()
