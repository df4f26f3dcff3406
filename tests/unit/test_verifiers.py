"""A verifier returns an answer's reward; one that can't be loaded is named."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.errors import ConfigError
from tlt.rewards.kinds.verifiers import load_extractor, load_verifier
from tlt.rewards.process.request_scorer import load_scorer
from tlt.rewards.reward_messages import ScoreRequest
from tlt.spec.reward import EXTRACTING, RewardSpec


def score(spec: RewardSpec, text: str, answer: Any = "", row: dict[str, Any] | None = None) -> Any:
    (result,) = load_scorer(spec).score(
        [ScoreRequest(completion=text, answer=answer, row=row or {})]
    )
    assert result.error is None
    return result.reward


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("so #42", "42", 1),
        ("so # 42 \n", 42, 1),
        ("#1#42", "42", 1),
        ("#42#1", "42", 0),
        ("42", "42", 0),
        ("#", "", 1),
        ("", "", 0),
    ],
)
def test_final_answer_is_what_follows_the_last_marker(
    text: str, answer: Any, expected: float
) -> None:
    assert score(RewardSpec(kind="final_answer"), text, answer) == expected


def test_final_answer_with_a_marker_of_ones_own() -> None:
    spec = RewardSpec(kind="final_answer", marker="Answer:")
    assert score(spec, "#1 Answer: 7", "7") == 1
    assert score(spec, "#7", "7") == 0


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("that is 1,234.50 metres", "1234.5", 1),
        ("it is -3e2.", -300, 1),
        (".5", 0.5, 1),
        ("7 and then 8", "7", 0),
        ("3.0000001", "3", 1),
        ("3.001", "3", 0),
        ("1e999", "1e999", 0),
        ("none", "7", 0),
        ("7", "none", 0),
        ("", "", 0),
    ],
)
def test_numeric_compares_the_last_numbers(text: str, answer: Any, expected: float) -> None:
    assert score(RewardSpec(kind="numeric"), text, answer) == expected


def test_numeric_tolerance_is_relative_to_large_answers() -> None:
    spec = RewardSpec(kind="numeric", tolerance=0.01)
    assert [score(spec, text, "1000") for text in ("1009", "991", "1011", "989")] == [1, 1, 0, 0]
    assert [score(spec, text, "0") for text in ("0.009", "0.011")] == [1, 0]


@pytest.mark.parametrize(
    ("pattern", "text", "answer", "expected"),
    [
        (r"x=(\d+)", "x=1 x=2", "2", 1),
        (r"x=(\d+)", "x=1 x=2", "1", 0),
        (r"\d+", "1 2", 2, 1),
        (r"<a>(.*?)</a>", "<a> one\ntwo </a>", "one\ntwo", 1),
        (r"(a)|b", "b", "b", 0),
        (r"y", "x", "None", 0),
    ],
)
def test_regex_captures_the_last_match(
    pattern: str, text: str, answer: Any, expected: float
) -> None:
    assert score(RewardSpec(kind="regex", pattern=pattern), text, answer) == expected


def test_refuses_an_invalid_regex() -> None:
    with pytest.raises(ConfigError, match=r"reward.pattern: '\(': missing \)"):
        load_verifier(RewardSpec(kind="regex", pattern="("))


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (r"\boxed{42}", "42", 1),
        (r"\boxed{1} then \boxed{ 2 }.", "2", 1),
        (r"\boxed{\frac{1}{2}} and }", r"\frac{1}{2}", 1),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", 1),
        (r"\boxed{a{b{c}}", "a{b{c}", 0),
        (r"\boxed{}", "", 1),
        ("42", "42", 0),
    ],
)
def test_boxed_keeps_nested_braces(text: str, answer: str, expected: float) -> None:
    assert score(RewardSpec(kind="boxed"), text, answer) == expected


@given(text=st.text(alphabet="\\boxed{}#1.,-e+ "), answer=st.text(alphabet="1.,-e{}# "))
def test_built_in_verifiers_return_0_or_1(text: str, answer: str) -> None:
    for spec in (
        RewardSpec(kind="final_answer"),
        RewardSpec(kind="numeric"),
        RewardSpec(kind="boxed"),
        RewardSpec(kind="regex", pattern="1(.)?"),
    ):
        assert score(spec, text, answer) in (0.0, 1.0)


# --- functions of the user


def function(dotted: str) -> RewardSpec:
    return RewardSpec(kind="function", function=dotted)


def write(folder: Path, name: str, code: str) -> Path:
    path = folder / name
    path.write_text(code)
    return path


CODE = "def reward(*, completion, answer, row):\n    return len(completion) + answer + row['x']\n"


def test_loads_a_function_by_dotted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_a_test").mkdir()
    write(tmp_path / "rewards_of_a_test", "deep.py", CODE)
    monkeypatch.syspath_prepend(tmp_path)
    assert score(function("rewards_of_a_test.deep:reward"), "ab", 3, {"x": 0.5}) == 5.5


def test_loads_a_function_from_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, "own.py", CODE)
    assert score(function(f"{path}:reward"), "ab", 3, {"x": 0.5}) == 5.5


def test_file_with_the_name_of_a_module_does_not_replace_it(tmp_path: Path) -> None:
    import json

    path = write(tmp_path, "json.py", CODE)
    assert score(function(f"{path}:reward"), "ab", 3, {"x": 0.5}) == 5.5
    assert sys.modules["json"] is json


def test_loads_a_file_with_a_dataclass(tmp_path: Path) -> None:
    code = "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\n" + CODE
    assert score(function(f"{write(tmp_path, 'data.py', code)}:reward"), "", 1, {"x": 1}) == 2


@pytest.mark.parametrize(
    ("dotted", "complaint"),
    [
        ("name", "'name': write package.module:name or file.py:name"),
        ("module:", "write package.module:name"),
        (":name", "write package.module:name"),
        ("no.such:name", "no.such cannot be imported: ModuleNotFoundError: No module named 'no'"),
        ("json:nothing", "json has no function 'nothing'"),
        ("sys:path", "sys has no function 'path'"),
        ("/nowhere/own.py:name", "/nowhere/own.py: no such file"),
    ],
)
def test_refuses_a_missing_function(dotted: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_scorer(function(dotted))
    assert str(error.value).startswith("reward.function: ")
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("def", "cannot be imported: SyntaxError: "),
        ("import sys; sys.exit(3)", "cannot be imported: SystemExit: 3"),
        ("import no_such_module", "cannot be imported: ModuleNotFoundError: "),
    ],
)
@pytest.mark.parametrize("by_file", [True, False])
def test_refuses_a_module_that_raises_on_import(
    by_file: bool, code: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "broken_reward.py", code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_scorer(function(f"{path if by_file else 'broken_reward'}:reward"))
    assert complaint in str(error.value)


@pytest.mark.parametrize("key", ["pattern", "marker"])
def test_refuses_to_look_for_a_tag_that_is_never_judged(key: str) -> None:
    kind = "regex" if key == "pattern" else "final_answer"
    spec = RewardSpec(**{"kind": kind, "pattern": "x", key: r"<\/think>"})
    with pytest.raises(ConfigError, match=rf"reward.{key}: .* looks for </think>"):
        load_scorer(spec)


EXTRACTED: list[tuple[RewardSpec, str, str | None]] = [
    (RewardSpec(kind="final_answer"), "so # 42 ", "42"),
    (RewardSpec(kind="final_answer"), "so 42", None),
    (RewardSpec(kind="numeric"), "1 or 42.0", "42.0"),
    (RewardSpec(kind="numeric"), "4.2e1", "42.0"),
    (RewardSpec(kind="regex", pattern=r"is (\d+)"), "it is 41, it is 42", "42"),
    (RewardSpec(kind="boxed"), r"\boxed{4 2}", "4 2"),
    (RewardSpec(kind="math"), r"so \boxed{\frac{1}{2}}", "1/2"),
    (RewardSpec(kind="math"), r"so \boxed{0.50}", "1/2"),
    (RewardSpec(kind="math"), r"so \boxed{1,000}", "1000"),
    (RewardSpec(kind="math"), r"so \boxed{x+1", None),
    (RewardSpec(kind="reasoning_gym"), "<answer>41</answer> <answer> 42 </answer>.", "42"),
    (RewardSpec(kind="reasoning_gym"), " 42 ", "42"),
    (RewardSpec(kind="code"), "42", None),
]


@pytest.mark.parametrize(("spec", "text", "expected"), EXTRACTED)
def test_extracts_what_an_answer_says_in_the_end(
    spec: RewardSpec, text: str, expected: str | None
) -> None:
    extract = load_extractor(spec)
    assert (None if extract is None else extract(text)) == expected
    assert (extract is not None) == (spec.kind in EXTRACTING)


@pytest.mark.parametrize("extract", [True, False])
def test_extracts_only_if_asked_to(extract: bool) -> None:
    request = ScoreRequest(completion="#7", answer="8", row={}, extract=extract)
    (result,) = load_scorer(RewardSpec(kind="final_answer")).score([request])
    assert (result.reward, result.final) == (0.0, "7" if extract else None)
