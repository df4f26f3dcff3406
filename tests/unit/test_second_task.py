"""examples/brief_sums is a complete task of a user, with data, keys and reward of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tlt.data.dataset import read_rows
from tlt.rewards.process.request_scorer import RequestScorer, load_scorer
from tlt.rewards.reward_messages import ScoreRequest
from tlt.spec.config import JobSpec
from tlt.spec.spec_files import load_job_spec

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "brief_sums"
ONCE = "12+34:2+4=06,1+3+0=04>46;#46"
ROW = {"question": "12+34=", "target": "46", "enough": 28}


@pytest.fixture(scope="module")
def spec() -> JobSpec:
    return load_job_spec(FOLDER / "job.yaml")


@pytest.fixture(scope="module")
def scorer(spec: JobSpec) -> RequestScorer:
    (reward,) = spec.rewards
    return load_scorer(reward)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (ONCE, 1.0),
        ("#46", 1.0),
        (f"{ONCE}={ONCE}", 28 / 57),
        (f"{ONCE}={ONCE}={ONCE}", 28 / 86),
        (f"{ONCE}=#47", 0.0),
        (ONCE[:-3], 0.0),
        ("", 0.0),
    ],
)
def test_rewards_right_and_brief_answers(
    scorer: RequestScorer, completion: str, reward: float
) -> None:
    (result,) = scorer.score([ScoreRequest(completion=completion, answer="46", row=ROW)])
    assert result.reward == pytest.approx(reward)


def test_shipped_data_equal_those_of_the_script(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(FOLDER / "make_data.py"), str(tmp_path)], check=True)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (FOLDER / name).read_bytes() == (tmp_path / name).read_bytes()


def test_rows_are_right_and_held_out_rows_are_new(spec: JobSpec) -> None:
    train, held_out = _rows(spec.data.train), _rows(spec.data.eval)
    questions = [row["question"] for row in (*train, *held_out)]
    assert len(set(questions)) == len(questions) == 512 + 256
    for row in (*train, *held_out):
        terms = [int(term) for term in row["question"].rstrip("=").split("+")]
        assert int(row["target"]) == sum(terms) % 100
        assert row["enough"] == 25 * (len(terms) - 1) + 3


def _rows(file: Any) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(file)]
