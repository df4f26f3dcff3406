"""`reward.kind: math` judges an answer by the rules of docs/rewards.md."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.math_notation_pairs import RIGHT_NOTATION, WRONG_NOTATION
from tests.unit.math_right_pairs import RIGHT
from tests.unit.math_unboxed_pairs import UNBOXED
from tests.unit.math_wrong_pairs import WRONG
from tlt.rewards.math.extraction import gold_text
from tlt.rewards.process.request_scorer import load_scorer
from tlt.rewards.reward_messages import ScoreRequest
from tlt.spec.reward import RewardSpec

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "rewards.md"
GOLDS = sorted(
    {text for _, gold in [*RIGHT, *UNBOXED, *WRONG, *RIGHT_NOTATION] if (text := gold_text(gold))}
)
SCORER = load_scorer(RewardSpec(kind="math"))


def judge(completion: str, gold: Any) -> bool:
    request = ScoreRequest(completion=completion, answer=gold, row={})
    (result,) = SCORER.score([request])
    assert result.reward in (0.0, 1.0), result.error
    return result.reward == 1.0


def documented() -> list[tuple[str, str, str]]:
    """Read the examples of the page: a completion, the right answer, and how it is judged."""
    section = PAGE.read_text().partition("## Maths")[2]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return [(row[1].strip("`"), row[2].strip("`"), row[3]) for row in cells[2:]]


@pytest.mark.parametrize(("completion", "gold"), [*RIGHT, *UNBOXED, *RIGHT_NOTATION])
def test_right(completion: str, gold: Any) -> None:
    assert judge(completion, gold)


@pytest.mark.parametrize(("completion", "gold"), [*WRONG, *WRONG_NOTATION])
def test_wrong(completion: str, gold: Any) -> None:
    assert not judge(completion, gold)


def test_table_has_many_wrong_answers() -> None:
    assert len(WRONG) * 3 >= len(RIGHT) + len(UNBOXED) + len(WRONG) >= 120


@pytest.mark.parametrize(("completion", "gold", "judged"), documented())
def test_documented_rule_holds(completion: str, gold: str, judged: str) -> None:
    assert judged in ("right", "wrong")
    assert judge(completion, gold) == (judged == "right")


def test_page_documents_rules() -> None:
    assert len(documented()) >= 50


@pytest.mark.parametrize("gold", GOLDS)
def test_right_answer_is_right(gold: str) -> None:
    assert judge(rf"So the answer is \boxed{{{gold}}}.", gold)


@pytest.mark.parametrize("gold", [42, 42.0, "42", ["41", 42], r"\boxed{42}", "6*7=42\n#### 42"])
def test_reads_the_right_answer_of_any_column(gold: Any) -> None:
    assert judge(r"\boxed{42}", gold)
    assert not judge(r"\boxed{43}", gold)


SLOW = [
    "9^{9^{9^{9}}}",
    "9**9**9**9",
    "(10^9)!",
    "((10^9)!)!",
    "10!!!!!!!!",
    "x^{10^{100}}",
    "10^{10^{10}}",
    r"\sqrt[9^{9^{9}}]{2}",
    r"\binom{10^9}{5\cdot 10^8}",
    r"\sum_{k=1}^{10^9} k^k",
    r"\prod_{k=1}^{10^9} k",
    r"\int_0^1 x^{x^x} dx",
    r"e^{e^{e^{e^{e^{e}}}}}",
    r"\Gamma(10^9)",
    r"\sin(10^{10^{10}})",
    "1e999999999",
    "(x+y+z+w)^{500000}",
    "(" * 5000 + "1" + ")" * 5000,
    "{" * 700 + "1" + "}" * 700,
    "9" * 100_000,
    "9" * 3999,
    "1," * 400 + "1",
    "(1," * 200,
    r"\frac{1}{" * 80 + "2" + "}" * 80,
    r"\sqrt" * 190 + "2",
    r"\pm" * 300,
    r"\text{" * 150,
    "^" * 500,
    "|" * 200,
    "1 1/" * 200,
    r"\infty-\infty",
    r"\frac{1}{0}",
    r"\boxed{" * 1000,
]


def test_refuses_what_would_take_long_at_once() -> None:
    judge(r"\boxed{x+1}", "x+2")  # loads the parser's tables
    began = time.process_time()
    assert not any(judge(rf"\boxed{{{text}}}", "42") for text in SLOW)
    assert time.process_time() - began < 2


ALPHABET = [
    *"0123456789xyi+-*/^_=<>(),.;:%$![]{}|& ",
    *re.findall(
        r"\S+",
        r"""\frac \sqrt \pi \cdot \pm \cup \{ \} \text{ \boxed{ \infty \leq \left( \right) \\ \in
        \sin \overline{ \begin{pmatrix} \end{pmatrix} \pmod ½ ² √ − ° or and cm ####""",
    ),
]


@given(st.lists(st.sampled_from(ALPHABET), max_size=14).map("".join))
def test_any_text_is_judged(text: str) -> None:
    assert judge(rf"\boxed{{{text}}}", "12345678.9") in (True, False)
    assert judge(text, text) in (True, False)
    assert judge(r"\boxed{12345678.9}", text) in (True, False)
