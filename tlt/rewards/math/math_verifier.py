"""Judge a mathematical answer as a mathematician would; docs/rewards.md has the conventions."""

import logging
import re
from typing import Any

from tlt.rewards.math.answers import gold_reading, parse, readings
from tlt.rewards.math.comparison import same
from tlt.rewards.math.extraction import final_answers, gold_text
from tlt.rewards.math.formulas import depth_of
from tlt.rewards.math.numbers import parse_number

# a longer answer is right only if it is written as the right one is
_LONGEST = 1000
_LONGEST_NUMBER = 4000
_DEEPEST = 30
_CHOICE = re.compile(r"\(?([A-J])\)?[.:]?")
_CHOSEN = re.compile(
    r"(?:option|choice|answer)?\s*\(?\s*([A-Ja-j])\s*(?:[).:](?:\s.*)?|\))?", re.I | re.DOTALL
)
# a choice's letter as it is set before what it stands for
_MARKED = re.compile(r"(?<![A-Za-z])([A-J])(?=[).:])")
_WITH_CHOICE = re.compile(r"\(([A-J])\)\s*(.+)", re.DOTALL)

# it warns that nothing limits its time; the parent of this process does
logging.getLogger("math_verify").setLevel(logging.ERROR)


def judge(completion: str, gold: Any) -> bool:
    """Find out whether a completion's answer is right; a list has several right answers."""
    if isinstance(gold, list | tuple):
        return any(judge(completion, one) for one in gold)  # pyright: ignore[reportUnknownVariableType]
    right = gold_text(gold)
    if not right or gold is None:
        return False
    letter = _CHOICE.fullmatch(_plain(right))
    answers = final_answers(completion, letter=letter is not None)
    if letter:
        return bool(answers) and _chosen(answers[-1]) == letter[1]
    return any(_same_text(right, answer) for answer in answers)


def stated(completion: str) -> str | None:
    """Return a completion's answer, the same for 0.5, 1/2 and \\frac{1}{2}."""
    answers = final_answers(completion)
    if not answers or len(answers[-1]) > _LONGEST:
        return None
    text = readings(answers[-1])[0]
    number = parse_number(text)
    return (text or None) if number is None else str(number.value)


def _plain(text: str) -> str:
    """Drop what a letter may be set in."""
    text = re.sub(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}|[$*{}]|\\[()!]", r"\1", text)
    return re.sub(r"\\[ ,;]|~|\\q?quad", " ", text).strip()


def _chosen(answer: str) -> str | None:
    text = _plain(answer)
    match = _CHOSEN.fullmatch(text)
    if match is None or len(set(_MARKED.findall(text))) > 1:
        return None  # none, or several
    return match[1].upper()


def _same_text(gold: str, answer: str) -> bool:
    if gold == answer:
        return True
    digits = _LONGEST_NUMBER if answer.replace(",", "").strip("-+ $").isdigit() else _LONGEST
    if len(answer) > digits or len(gold) > _LONGEST_NUMBER or depth_of(answer) > _DEEPEST:
        return False
    if chosen := _WITH_CHOICE.fullmatch(_plain(answer)):
        answer = chosen[2]
    expected = gold_reading(gold)
    if not expected:
        return False
    right = parse(expected)
    return any(text == expected or same(right, parse(text)) for text in readings(answer) if text)
