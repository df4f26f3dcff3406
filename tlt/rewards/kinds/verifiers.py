"""Verifiers map an answer to its reward; the built-in ones return 1 or 0, or a share.

The text that these get is what follows the answer's thought.
"""

import re
from collections.abc import Callable
from typing import Any, Protocol

from tlt.data.dataset import Row
from tlt.data.thoughts import tag_in
from tlt.errors import ConfigError
from tlt.rewards.kinds.code_tests import CodeTests
from tlt.rewards.kinds.reasoning_gym_scores import load_gym, score_answer, stated_answer
from tlt.rewards.kinds.url_judge import UrlJudge
from tlt.spec.reward import RewardSpec


class Verifier(Protocol):
    def __call__(self, text: str, answer: Any, row: Row, /) -> float | None:
        """Return the reward, or None where it doesn't apply."""
        ...


_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_BOXED = "\\boxed{"


def load_verifier(spec: RewardSpec) -> Verifier:
    """Raise ConfigError if it could judge no answer."""
    _refuse_tags("pattern", spec.pattern or "")
    _refuse_tags("marker", spec.marker)
    match spec.kind:
        case "final_answer":
            return lambda text, answer, row: float(_after(text, spec.marker) == _text(answer))
        case "numeric":
            return lambda text, answer, row: float(
                _same_number(_last_number(text), _last_number(_text(answer)), spec.tolerance)
            )
        case "math":
            # it takes half a second to load
            from tlt.rewards.math.math_verifier import judge

            return lambda text, answer, row: float(judge(text, answer))
        case "regex":
            pattern = _compiled(spec.pattern or "")
            return lambda text, answer, row: float(_captured(pattern, text) == _text(answer))
        case "boxed":
            return lambda text, answer, row: float(_boxed(text) == _text(answer))
        case "code":
            return CodeTests(spec)
        case "reasoning_gym":
            load_gym()
            return score_answer
        case "url":
            return UrlJudge(spec)
        case "function" | "model" | "environment":
            raise AssertionError(f"a {spec.kind} is no built-in verifier")


def load_extractor(spec: RewardSpec) -> Callable[[str], str | None] | None:
    """Return how a kind of reward finds what an answer says in the end; None if it doesn't.

    Answers that mean the same number are extracted as the same text, so that they can be counted.
    """
    match spec.kind:
        case "final_answer":
            return lambda text: _after(text, spec.marker)
        case "numeric":
            return lambda text: _as_text(_last_number(text))
        case "math":
            from tlt.rewards.math.math_verifier import stated

            return stated
        case "regex":
            pattern = _compiled(spec.pattern or "")
            return lambda text: _captured(pattern, text)
        case "boxed":
            return _boxed
        case "reasoning_gym":
            return stated_answer
        case "code" | "url" | "function" | "model" | "environment":
            return None


def _refuse_tags(key: str, text: str) -> None:
    if tag := tag_in(text.replace("\\", "")):
        raise ConfigError(
            f"reward.{key}: '{text}' looks for {tag}, but only what follows the thought is judged; "
            "leave the tag out"
        )


def _as_text(number: float | None) -> str | None:
    return None if number is None else repr(number)


def _text(answer: Any) -> str:
    return str(answer).strip()


def _after(text: str, marker: str) -> str | None:
    _, separator, rest = text.rpartition(marker)
    return rest.strip() if separator else None


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def _same_number(left: float | None, right: float | None, tolerance: float) -> bool:
    if left is None or right is None:
        return False
    return abs(left - right) <= tolerance * max(1.0, abs(right))


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward.pattern: '{pattern}': {error}") from error


def _captured(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the last match's first group, or the whole match if the pattern has no group."""
    last = None
    for match in pattern.finditer(text):
        last = match
    if last is None:
        return None
    captured = last.group(1) if pattern.groups else last.group(0)
    return None if captured is None else captured.strip()


def _boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 1
    begin = start + len(_BOXED)
    for index in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begin:index].strip()
    return None
