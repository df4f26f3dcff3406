"""The example's data depend only on a seed, and its answers are right."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from examples.tiny_reasoner import task, vocabulary

MODEL = Path(task.__file__).parent / "model"


@pytest.fixture
def rng() -> random.Random:
    return random.Random(5)


def test_flawless_solution_ends_in_the_right_answer(rng: random.Random) -> None:
    for _ in range(200):
        problem = task.draw_problem(rng)
        text = task.worked_solution(problem, rng)
        assert task.final_answer(text) == task.right_answer(problem)
        assert task.reward(text, task.right_answer(problem)) == 1.0


def test_solution_spells_out_both_digits_and_the_carry(rng: random.Random) -> None:
    expected = "57+68:7+8=15,5+6+1=12>25;25+04:5+4=09,2+0+0=02>29;#29"
    assert task.worked_solution((57, 68, 4), rng) == expected


def test_slips_spoil_some_answers_and_not_all(rng: random.Random) -> None:
    habits = task.Habits(slip=0.08, recheck=0.0)
    problems = [task.draw_problem(rng) for _ in range(500)]
    right = sum(
        task.reward(task.worked_solution(p, rng, habits), task.right_answer(p)) for p in problems
    )
    assert 250 < right < 450


def test_rechecks_stay_under_the_cap(rng: random.Random) -> None:
    habits = task.Habits(slip=0.0, recheck=1.0, max_chars=300)
    problem = task.draw_problem(rng, max_terms=4)
    text = task.worked_solution(problem, rng, habits)
    assert text.count("#") > 1
    assert len(text) <= 300
    assert task.final_answer(text) == task.right_answer(problem)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [("#12=#46", "46"), ("12+34", None), ("#", ""), ("#46#4", "4")],
)
def test_final_answer_follows_the_last_mark(completion: str, answer: str | None) -> None:
    assert task.final_answer(completion) == answer


def test_data_repeat_by_seed_and_never_overlap(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        task.write_data(tmp_path / folder, seed=3)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    train, held_out = (_prompts(tmp_path / "first" / f"{name}.jsonl") for name in ("train", "eval"))
    assert (len(train), len(held_out)) == (4096, 512)
    assert len(set(train) | set(held_out)) == 4096 + 512
    assert max(prompt.count("+") + 1 for prompt in held_out) <= task.MAX_EVAL_TERMS
    assert task.eval_problems(seed=3) != task.eval_problems(seed=4)


def test_rows_hold_prompt_and_answer(tmp_path: Path) -> None:
    task.write_rows([(12, 34), (99, 2, 3)], tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows == [
        {"prompt": "12+34=", "answer": "46"},
        {"prompt": "99+02+03=", "answer": "04"},
    ]


def test_tokenizer_round_trips_and_agrees_with_encode(rng: random.Random) -> None:
    tokenizer = vocabulary.build_tokenizer()
    for _ in range(50):
        problem = task.draw_problem(rng)
        text = task.prompt_text(problem) + task.worked_solution(problem, rng, task.Habits())
        ids: list[int] = tokenizer.encode(text).ids
        assert ids == [vocabulary.BOS, *vocabulary.encode(text)]
        assert tokenizer.decode([*ids, vocabulary.EOS], skip_special_tokens=True) == text
        assert vocabulary.decode([*ids, vocabulary.EOS]) == text


def test_unknown_characters_become_unknown_tokens() -> None:
    ids: list[int] = vocabulary.build_tokenizer().encode("a\n1").ids
    assert ids == [vocabulary.BOS, vocabulary.UNK, vocabulary.UNK, *vocabulary.encode("1")]


def test_shipped_tokenizer_equals_the_built_one() -> None:
    shipped = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert shipped.to_str() == vocabulary.build_tokenizer().to_str()


def test_shipped_data_equal_those_of_seed_0(tmp_path: Path) -> None:
    task.write_data(tmp_path)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (MODEL.parent / "data" / name).read_bytes() == (tmp_path / name).read_bytes()


def _prompts(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
