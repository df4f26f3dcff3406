"""`tlt data check` finds what would spoil a job's training, and exits with 1."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from examples.tiny_reasoner import task
from tests.in_process_cli import run_command
from tlt.data.dataset import Prompt
from tlt.doctor.data_check.check_data import DataReport
from tlt.doctor.data_check.prompt_sets import EvenSample, SourcePrompt
from tlt.doctor.findings import Finding

MODEL = Path(task.__file__).parent / "model"
ROOT = Path(task.__file__).parents[2]
SUMS = [{"prompt": f"What is {n} and {n}?", "answer": str(2 * n)} for n in range(10, 50)]
Rows = Sequence[Mapping[str, Any]]


def write(file: Path, rows: Rows) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


class Check:
    """Check data that a test writes, with the reward that it names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(
        self, reward: Any, rows: Rows, held_out: Rows = (), *options: str, **data: Any
    ) -> tuple[int, DataReport]:
        spec = {
            "policy": {"path": str(MODEL), "max_context": 512},
            "data": {"train": write(self.folder / "train.jsonl", rows)} | data,
            "reward": reward,
            "algorithm": {"steps": 1, "prompts_per_step": 1, "group_size": 2},
        }
        if held_out:
            spec["data"]["eval"] = write(self.folder / "eval.jsonl", held_out)
        (self.folder / "job.yaml").write_text(yaml.safe_dump(spec))
        done = run_command("data", "check", str(self.folder / "job.yaml"), "--json", *options)
        assert done.stdout, done.stderr
        return done.code, msgspec.json.decode(done.stdout, type=DataReport)


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(tmp_path)


def finding(report: DataReport, subject: str) -> Finding:
    found = [each for each in report.findings if each.subject == subject]
    assert found, report.findings
    return found[0]


@pytest.mark.parametrize("spec", ["configs/tiny-reasoner.yaml", "examples/brief_sums/job.yaml"])
def test_finds_nothing_wrong_in_what_is_shipped(spec: str) -> None:
    done = run_command("data", "check", str(ROOT / spec), "--limit", "20")
    assert (done.code, done.stderr) == (0, "")
    assert "the gold of 20 of 20 rows is right as #gold" in done.stdout
    assert "nothing is wrong" in done.stdout


@pytest.mark.parametrize(
    ("reward", "form"),
    [
        ({"kind": "math"}, "as it is"),
        ({"kind": "boxed"}, r"\boxed{gold}"),
        ({"kind": "numeric"}, "as it is"),
        ({"kind": "final_answer", "marker": "so "}, "so gold"),
        ({"kind": "regex", "pattern": "<answer>(.*)</answer>"}, "<answer>gold</answer>"),
    ],
)
def test_says_in_which_form_a_reward_takes_the_gold(check: Check, reward: Any, form: str) -> None:
    code, report = check.run(reward, SUMS)
    (gold,) = report.gold
    assert (code, gold.rows, gold.right, gold.form) == (0, 40, 40, form)


@pytest.mark.parametrize("kind", ["final_answer", "boxed", "regex"])
def test_finds_gold_that_no_answer_can_match(check: Check, kind: str) -> None:
    """A whole solution in place of the final answer, as GSM8K has it."""
    rows = [
        {**row, "answer": f"Add them:\nthat is {row['answer']}.\n#### {row['answer']}"}
        for row in SUMS
    ]
    reward = {"kind": kind, "marker": "####", "pattern": "answer is (.*)"}
    code, report = check.run(reward, rows)
    found = finding(report, f"{kind} of data.train")
    assert (code, found.status) == (1, "wrong")
    assert found.found == "the gold of 0 of 40 rows is right"
    assert "answer_key" in found.advice
    assert check.run({"kind": "math"}, rows)[0] == 0


def test_scores_rows_that_are_spread_evenly(check: Check) -> None:
    rows = [{**row, "answer": row["answer"] if n < 30 else "?"} for n, row in enumerate(SUMS)]
    _, report = check.run({"kind": "numeric"}, rows, (), "--limit", "8")
    (gold,) = report.gold
    assert (gold.rows, gold.right) == (8, 7)
    assert "train.jsonl:3" in str(gold.less)


@pytest.mark.parametrize(("count", "limit"), [(1, 5), (5, 5), (9, 5), (1000, 7), (4096, 200)])
def test_a_sample_reaches_from_the_first_to_the_last_rows(count: int, limit: int) -> None:
    sample = EvenSample(limit)
    for index in range(count):
        sample.add(SourcePrompt(str(index), "", Prompt(tokens=(index,), row={})))
    places = [int(prompt.location) for prompt in sample.prompts()]
    assert len(places) == min(count, limit)
    assert places[0] == 0
    gaps = [b - a for a, b in zip(places, [*places[1:], count], strict=True)]
    assert max(gaps) <= 2 * count / len(places) + 1


def test_finds_repeats_rows_without_an_answer_and_long_prompts(check: Check) -> None:
    rows = [
        *SUMS,
        SUMS[3],
        {"prompt": "Empty?", "answer": " "},
        {"prompt": "None?", "answer": None},
        {"prompt": "1" * 600, "answer": "1"},
    ]
    code, report = check.run({"kind": "math"}, rows)
    (figures,) = report.sets
    assert (figures.rows, figures.repeated, figures.without_answer) == (44, 1, 2)
    assert (figures.too_long, figures.longest >= 600, figures.p50 < 30) == (1, True, True)
    assert code == 0
    repeats = finding(report, "repeats in data.train")
    assert repeats.found.endswith("train.jsonl:41 of " + str(check.folder / "train.jsonl:4"))
    assert "train.jsonl:42" in finding(report, "answers of data.train").found
    assert finding(report, "length of data.train").status == "warning"
    code, report = check.run({"kind": "math"}, rows, long_prompts="refuse")
    assert (code, finding(report, "length of data.train").status) == (1, "wrong")


INSTRUCTION = (
    "Solve the following problem step by step and write the answer in the last line of your reply."
)
STORY = "A train leaves the old town at noon with {} cars and picks up {} more at each of {} stops"


def test_finds_held_out_prompts_that_are_trained_on(check: Check) -> None:
    def asked(text: str) -> dict[str, str]:
        return {"prompt": f"{INSTRUCTION} {text}", "answer": "1"}

    train = [asked(f"What is {n} plus {n}?") for n in range(30)]
    train.append(asked(f"{STORY.format(3, 4, 5)}: how many are there?"))
    held_out = [asked(f"What is {n} minus {n}?") for n in range(8)]
    assert check.run({"kind": "math"}, train, held_out)[0] == 0

    same = {"prompt": train[7]["prompt"].upper().replace(" ", "  "), "answer": "1"}
    reworded = asked(f"{STORY.format(3, 4, 5)}. Count the cars!")
    code, report = check.run({"kind": "math"}, train, [*held_out, same, reworded])
    exact, similar = [f for f in report.findings if f.subject == "leakage of data.eval"]
    assert (code, exact.status, similar.status) == (1, "wrong", "warning")
    folder = check.folder
    assert exact.found == (
        f"training data has 1 of 10 prompts: {folder}/eval.jsonl:9 is {folder}/train.jsonl:8"
    )
    assert "1 of 10 prompts share 13 words" in similar.found
    assert similar.found.endswith(f"{folder}/eval.jsonl:10 with {folder}/train.jsonl:31")


REWARDS = """
def tagged(completion, answer, row, length):
    return float(completion == f"<answer>{answer}</answer>" and length > 0)

def half(completion, answer, row):
    return 0.5 if answer in completion else 0.0

def fails(completion, answer, row):
    return row["nothing"]

def source(completion, answer, row):
    return float(row["source"] == "sums" and row["prompt"].startswith("What"))
"""


@pytest.mark.parametrize(
    ("name", "code", "found"),
    [
        ("tagged", 0, "the gold of 40 of 40 rows is right as <answer>gold</answer>"),
        ("half", 0, "the gold of 40 of 40 rows gets more than 0, 0.5 at most"),
        ("fails", 1, "the gold of 0 of 40 rows gets more than 0; 40 failed: "),
    ],
)
def test_tries_forms_on_a_function(check: Check, name: str, code: int, found: str) -> None:
    (check.folder / "reward.py").write_text(REWARDS)
    reward = {"kind": "function", "function": f"reward.py:{name}"}
    ended, report = check.run(reward, SUMS)
    assert ended == code
    assert finding(report, "function of data.train").found.startswith(found)


def test_correct_at_says_what_a_function_has_to_give(check: Check) -> None:
    (check.folder / "reward.py").write_text(REWARDS)
    reward = {"kind": "function", "function": "reward.py:half", "correct_at": 0.5}
    code, report = check.run(reward, SUMS)
    assert (code, report.gold[0].right, report.gold[0].form) == (0, 40, "as it is")
    code, report = check.run(reward | {"correct_at": 0.6}, SUMS)
    assert (code, report.gold[0].right, report.gold[0].positive) == (1, 0, 40)


def test_a_function_gets_the_rows_of_a_mixture_as_in_a_job(check: Check) -> None:
    (check.folder / "reward.py").write_text(REWARDS)
    rows = [{"question": row["prompt"], "answer": row["answer"]} for row in SUMS]
    path = write(check.folder / "sums.jsonl", rows)
    train = [{"path": path, "prompt_key": "question", "weight": 1}]
    reward = {"kind": "function", "function": "reward.py:source"}
    code, report = check.run(reward, rows, train=train)
    assert (code, report.gold[0].key, report.gold[0].right) == (0, "data.train.sums", 40)


def test_a_function_beside_a_verifier_may_be_about_something_else(check: Check) -> None:
    (check.folder / "reward.py").write_text("def brief(completion, **_):\n    return -0.1\n")
    brief = {"kind": "function", "function": "reward.py:brief"}
    code, report = check.run([{"kind": "numeric", "weight": 2.0}, brief], SUMS)
    assert (code, finding(report, "function of data.train").status) == (0, "warning")
    assert finding(report, "numeric of data.train").status == "ok"
    assert check.run(brief, SUMS)[0] == 1


def test_finds_a_source_to_which_no_reward_applies(check: Check) -> None:
    code = "def some(completion, answer, row):\n    return 1 if row['source'] == 'b' else None\n"
    (check.folder / "reward.py").write_text(code)
    train = [
        {"path": write(check.folder / f"{name}.jsonl", rows), "weight": 1}
        for name, rows in (("a", SUMS[:9]), ("b", SUMS[9:]))
    ]
    reward = {"kind": "function", "function": "reward.py:some"}
    ended, report = check.run(reward, SUMS, train=train)
    assert (ended, finding(report, "function of data.train.b").status) == (1, "ok")
    assert finding(report, "function of data.train.a").found == "it applies to none of 9 rows"
    assert finding(report, "rewards of data.train.a").status == "wrong"


def test_reads_nested_columns_and_rewards_by_source(check: Check) -> None:
    rows = [
        {
            "prompt": row["prompt"],
            "data_source": name,
            "reward_model": {"ground_truth": row["answer"] if name == "sums" else "not a number"},
        }
        for row, name in zip(SUMS, ["sums", "words"] * 20, strict=True)
    ]
    data = {"answer_key": "reward_model.ground_truth", "source_key": "data_source"}
    numbers = {"kind": "numeric", "sources": ["sums"]}
    code, report = check.run([numbers, {"kind": "boxed", "sources": ["words"]}], rows, **data)
    assert code == 0
    assert [(gold.reward, gold.rows, gold.right) for gold in report.gold] == [
        ("numeric", 20, 20),
        ("boxed", 20, 20),
    ]


SOURCED = [
    {**row, "source": name, "level": n}
    for n, (row, name) in enumerate(zip(SUMS, ["gsm8k", "other"] * 20, strict=True))
]


@pytest.mark.parametrize(
    ("sources", "column", "found"),
    [
        (["gsm8k"], "source", "train.jsonl:2: no reward scores 'other'"),
        (["gsm8k", "other", "othr"], "source", "reward.0.sources: no source or set has the name"),
        (["gsm8k", "other"], "sourc", "and it has no 'sourc' (data.source_key)"),
    ],
)
def test_finds_sources_for_which_a_job_is_refused(
    check: Check, sources: list[str], column: str, found: str
) -> None:
    reward = [{"kind": "numeric", "sources": sources}]
    code, report = check.run(reward, SOURCED, source_key=column)
    wrong = finding(report, "sources")
    assert (code, wrong.status, wrong.advice) == (1, "wrong", "a job is refused")
    assert found in wrong.found


def test_finds_an_order_for_which_a_job_is_refused(check: Check) -> None:
    def order(column: str, *more: Mapping[str, Any]) -> tuple[int, DataReport]:
        return check.run({"kind": "numeric"}, [*SOURCED, *more], order_by=column)

    code, report = order("levle")
    wrong = finding(report, "order of data.train")
    assert (code, wrong.status) == (1, "wrong")
    assert "train.jsonl: no key 'levle' (data.order_by); it has answer, level" in wrong.found
    odd = {**SOURCED[0], "prompt": "One?", "level": "hard"}
    assert "can't be compared" in finding(order("level", odd)[1], "order of data.train").found
    # a job leaves it out
    assert order("level", {**odd, "prompt": "1" * 600})[0] == 0


def test_calls_no_judge_unless_it_is_asked_to(check: Check) -> None:
    judge = {"kind": "url", "url": "http://127.0.0.1:9/", "timeout_seconds": 1}
    code, report = check.run([{"kind": "numeric"}, judge], SUMS)
    assert (code, finding(report, "url").found) == (0, "not called; --all-rewards calls it, too")
    asked = check.run([{"kind": "numeric"}, judge], SUMS[:1], (), "--all-rewards")[1]
    assert "1 failed" in finding(asked, "url of data.train").found


PROGRAMS = [
    {
        "prompt": f"Write f that adds {n}.",
        "answer": [f"assert f(1) == {n + 1}"],
        "code": f"def f(x):\n    return x + {n}",
    }
    for n in range(4)
]


def test_runs_the_programs_that_the_data_has(check: Check) -> None:
    wrong = {**PROGRAMS[0], "code": "def f(x):\n    return 7"}
    code, report = check.run({"kind": "code"}, [*PROGRAMS, wrong])
    found = finding(report, "code of data.train")
    assert (code, found.status) == (0, "warning")
    assert found.found == "the programs of 4 of 5 rows pass their tests (column code)"
    assert found.advice.endswith("train.jsonl:5")
    prose = [{**row, "code": "It adds."} for row in PROGRAMS]
    code, report = check.run({"kind": "code"}, prose)
    found = finding(report, "code of data.train")
    assert (code, found.status) == (1, "wrong")
    assert found.found == "the programs of 0 of 4 rows pass their tests (column code)"
    assert "may hold no Python" in found.advice


def test_parses_tests_where_there_are_no_programs(check: Check) -> None:
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in PROGRAMS]
    broken = [{"prompt": f"{n}?", "answer": ["assert f(1 =="]} for n in range(5)]
    code, report = check.run({"kind": "code"}, rows)
    assert code == 0
    assert finding(report, "code of data.train").found == "the tests of 4 of 4 rows parse"
    code, report = check.run({"kind": "code"}, [*rows, *broken])
    found = finding(report, "code of data.train")
    assert (code, found.status) == (1, "wrong")
    assert "the tests of 4 of 9 rows parse; 5 failed: " in found.found
    assert "SyntaxError" in found.found
