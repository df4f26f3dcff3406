"""Read the calls of tools in what a policy wrote, in the forms that chat templates teach.

Qwen and Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once or more often, with
a list of calls in some models. Llama: the JSON of a call is all of the message, behind
`<|python_tag|>` or not, with `parameters` for its arguments, and `;` between two calls.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from tlt.data.thoughts import text_after_thoughts
from tlt.environments.environment import Message

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse)


class MalformedCall(Exception):
    """A call that no tool can answer; its text tells the policy why."""


class _Found(NamedTuple):
    # the text beside the calls
    content: str
    calls: list[dict[str, Any]]


def assistant_message(text: str, in_thought: bool = False) -> Message:
    """Return the policy's text as a message with its calls; raise MalformedCall.

    `in_thought` says that the text before it opens a thought.
    """
    thought, spoken = _split_thought(text, in_thought)
    found = _find(spoken)
    message: Message = {"role": "assistant", "content": thought + found.content}
    if found.calls:
        message["tool_calls"] = [{"type": "function", "function": call} for call in found.calls]
    return message


def _split_thought(text: str, in_thought: bool) -> tuple[str, str]:
    """Return thoughts, in which no tool is called, and what follows them."""
    spoken = text_after_thoughts(text, in_thought=in_thought)
    if spoken is None:
        return text, ""
    return text[: len(text) - len(spoken)], spoken


def _find(text: str) -> _Found:
    if tagged := _TAGGED.findall(text):
        calls = [call for body in tagged for call in _calls(body)]
        return _Found(_TAGGED.sub("", text).strip(), calls)
    body = text.strip()
    if body.startswith(_PYTHON_TAG):
        return _Found("", list(_calls(body.removeprefix(_PYTHON_TAG))))
    if body.startswith("{") and '"name"' in body:
        return _Found("", list(_calls(body)))
    return _Found(text, [])


def _calls(body: str) -> Iterator[dict[str, Any]]:
    """Yield the calls of one or several JSON texts."""
    rest = body.strip()
    if not rest:
        raise MalformedCall("the call is empty")
    while rest:
        try:
            value, end = _decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            raise MalformedCall(f"the call is not valid JSON: {error}") from error
        yield from map(_checked, value if isinstance(value, list) else [value])
        rest = rest[end:].strip().removeprefix(";").strip()


def _checked(call: Any) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise MalformedCall('a call is an object with "name" and "arguments"')
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        # some models write JSON within JSON
        try:
            arguments = json.loads(arguments, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise MalformedCall(f"the arguments are not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise MalformedCall("a call's arguments are an object")
    found = {"name": call["name"], "arguments": arguments}
    try:
        msgspec.json.encode(found)
    except (ValueError, OverflowError, RecursionError) as error:  # half of a character, for example
        raise MalformedCall(f"the call can't be passed on: {error}") from error
    return found
