"""Held-out sets are evaluated alike within a job, by `tlt eval`, and from a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live import Live, wait_until, write_spec
from tlt.runs.run_answers import read_answers

pytestmark = pytest.mark.timeout(300)
ANSWERS = 4


@pytest.fixture(scope="module")
def two_sets_spec(live: Live, raw_spec: dict[str, Any]) -> Path:
    """Return a job with two sets; one has columns of its own, and a prompt that is too long."""
    own = live.home / "own.jsonl"
    rows = [{"sum": f"{i}+1=", "total": str(i + 1)} for i in (7, 3)]
    rows.insert(1, {"sum": "+".join(["12"] * 300), "total": "3600"})
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = {
        "digits": {"path": raw_spec["data"]["train"], "answers": ANSWERS, "limit": 6},
        "own": {
            "path": str(own),
            "answers": ANSWERS,
            "prompt_key": "sum",
            "answer_key": "total",
            "max_new_tokens": 12,
        },
    }
    spec = {**raw_spec, "name": "two-sets", "data": {**raw_spec["data"], "eval": sets}}
    return write_spec(live.home, spec, "two-sets.yaml")


@pytest.fixture(scope="module")
def job(live: Live, two_sets_spec: Path) -> str:
    name = live.submit(two_sets_spec)
    assert live.await_end(name)["status"] == "done", live.job(name)["error"]
    return name


def texts(live: Live, name: str, step: int) -> list[str | None]:
    return [row.text for row in read_answers(live.runs / name, "eval", step)]


def test_a_job_reports_each_set(live: Live, job: str) -> None:
    before, after = live.fold(job).evals
    assert [each.name for each in after.sets] == ["digits", "own"]
    digits, own = after.sets
    assert (digits.problems, own.problems, own.skipped) == (6, 2, 1)
    assert (digits.answers, list(digits.pass_at)) == (ANSWERS, [1, 2, ANSWERS])
    assert (digits.length.mean, own.length.mean, own.truncated) == (24, 12, 1.0)
    assert digits.majority is not None
    assert after.mean == pytest.approx((digits.mean + own.mean) / 2)
    assert before.gain is None
    assert after.gain is not None
    assert after.gain.value == pytest.approx(after.mean - before.mean)
    file = live.runs / job / "summary.json"
    wait_until(file.exists, "the summary")
    summary = json.loads(file.read_bytes())
    assert [each["name"] for each in summary["evaluations"][1]["sets"]] == ["digits", "own"]
    assert f"digits avg@{ANSWERS} {digits.mean:.3f}" in live.tlt("logs", job).stdout
    assert f" {digits.mean:.3f} " in live.tlt("ledger", job).stdout


def test_the_command_gives_the_answers_of_the_job(
    live: Live, two_sets_spec: Path, job: str
) -> None:
    """The same policy and seed give the same answers, before training and at a checkpoint."""
    for step, evaluated in zip((0, 2), live.fold(job).evals, strict=True):
        start = ["--from", job] if step else []
        alone = live.json("eval", str(two_sets_spec), *start)
        assert [each["mean"] for each in alone["sets"]] == [e.mean for e in evaluated.sets]
        assert texts(live, alone["job"], step) == texts(live, job, step)
        assert alone["version"] == step
    assert texts(live, job, 0) != texts(live, job, 2)


def test_the_answers_can_be_read_afterwards(live: Live, job: str) -> None:
    lines = live.tlt("samples", job, "--set", "own", "--json").stdout.splitlines()
    answers = [json.loads(line) for line in lines]
    assert [answer["right"] for answer in answers] == ["8"] * ANSWERS + ["4"] * ANSWERS
    assert {(answer["step"], answer["tokens"], answer["stop"]) for answer in answers} == {
        (2, 12, "length")
    }
    shown = live.tlt("samples", job, "--eval", "--step", "0", "--limit", "1").stdout
    assert "=== step 0, prompt 0 of digits, right is 0\n00+01=\n--- answer 0: reward" in shown
    assert "--- answer 3: reward" in shown
    assert "--set x: " in live.tlt("samples", job, "--set", "x", code=2).stderr
