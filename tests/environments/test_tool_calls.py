"""Calls are read in the forms of Qwen, Hermes, Llama and SmolLM2; what isn't one is told."""

import contextlib
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.environments.tool_calls import MalformedCall, assistant_message

ADD = {"name": "add", "arguments": {"a": 1, "b": "x}"}}
BODY = json.dumps(ADD)


def calls(text: str) -> list[dict[str, Any]]:
    found = assistant_message(text).get("tool_calls", [])
    assert all(call["type"] == "function" for call in found)
    return [call["function"] for call in found]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        # Hermes and Qwen
        (f"<tool_call>\n{BODY}\n</tool_call>", 1),
        (f"I add.\n<tool_call>\n{BODY}\n</tool_call>\n<tool_call>\n{BODY}\n</tool_call>", 2),
        # a stop string may have ended it
        (f"<tool_call>{BODY}", 1),
        # SmolLM2
        (f"<tool_call>[{BODY}, {BODY}]</tool_call>", 2),
        # Llama
        (json.dumps({"name": "add", "parameters": ADD["arguments"]}), 1),
        (f"<|python_tag|>{BODY}; {BODY}", 2),
        # JSON within JSON
        (json.dumps({"name": "add", "arguments": json.dumps(ADD["arguments"])}), 1),
    ],
)
def test_reads_the_forms_of_templates(text: str, count: int) -> None:
    assert calls(text) == [ADD] * count


def test_what_stands_beside_a_call_stays() -> None:
    message = assistant_message(f"I add.<tool_call>{BODY}</tool_call>")
    assert message["content"] == "I add."
    assert message["role"] == "assistant"


@pytest.mark.parametrize("text", ["", "The sum is 3.", "{1, 2}", '{"sum": 3}', "a } b {"])
def test_a_plain_answer_has_no_calls(text: str) -> None:
    assert assistant_message(text) == {"role": "assistant", "content": text}


def test_a_thought_calls_nothing() -> None:
    thought = f"<think>I could <tool_call>{BODY}</tool_call></think>"
    assert calls(f"{thought}No.") == []
    assert calls(f"{thought}<tool_call>{BODY}</tool_call>") == [ADD]
    assert calls(f"<think>I could <tool_call>{BODY}</tool_call>") == []
    assert assistant_message(f"{thought}No.")["content"] == f"{thought}No."


def test_a_thought_that_the_template_opens_calls_nothing() -> None:
    called = f"<tool_call>{BODY}</tool_call>"
    assert "tool_calls" not in assistant_message(called, in_thought=True)
    assert "tool_calls" in assistant_message(f"</think>{called}", in_thought=True)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("", "empty"),
        ("{", "not valid JSON"),
        ('{"name": 3}', '"name" and "arguments"'),
        ("[1]", '"name" and "arguments"'),
        ('{"name": "add", "arguments": [1]}', "an object"),
        ('{"name": "add", "arguments": "{"}', "arguments are not valid JSON"),
        (BODY + "}", "not valid JSON"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no number of JSON"),
        ('{"name": "add", "arguments": {"a": "\\ud83d"}}', "can't be passed on"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_tells_what_is_wrong_with_a_call(body: str, complaint: str) -> None:
    with pytest.raises(MalformedCall, match=complaint):
        assistant_message(f"<tool_call>{body}</tool_call>")


@given(st.integers(0, 10_000), st.text(max_size=60))
def test_any_text_is_a_message_or_a_malformed_call(seed: int, text: str) -> None:
    """Calls with a few characters changed are what models write."""
    rng = random.Random(seed)
    written = list(f"<tool_call>{BODY}</tool_call>{text}")
    for _ in range(rng.randrange(5)):
        at = rng.randrange(len(written))
        written[at] = rng.choice(["", '"', "{", "}", "[", "\\", "<", "x", written[at] * 2])
    with contextlib.suppress(MalformedCall):
        assert isinstance(assistant_message("".join(written))["content"], str)
