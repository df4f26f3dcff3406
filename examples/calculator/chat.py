"""A calculator as a tool, for a policy with a chat template: SmolLM2 asks it for a sum."""

import json
import re
from typing import Any

Message = dict[str, Any]

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Add or subtract two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"sum": {"type": "string", "description": "such as 12 + 34"}},
            "required": ["sum"],
        },
    },
}
_SUM = re.compile(r"\s*(\d+)\s*([+-])\s*(\d+)\s*")
# SmolLM2's template leaves tools out, so it is shown what a call looks like
_SHOWN = ("7 + 5", "41 - 30", "66 + 9")


class ChatCalculator:
    """Asks for a sum of reasoning-gym, and answers calls until the policy makes none."""

    def reset(self, row: dict[str, Any], seed: int) -> tuple[list[Message], list[Message]]:
        self._answer = row["answer"]
        system = f"You use tools: {json.dumps([TOOL])}"
        shown = [message for each in _SHOWN for message in _example(each)]
        asked = row["question"].rpartition(":")[2].strip(" =")
        return [{"role": "system", "content": system}, *shown, _question(asked)], [TOOL]

    def step(self, message: Message) -> tuple[list[Message], bool]:
        called = [call["function"] for call in message.get("tool_calls", [])]
        return [{"role": "tool", "content": _result(call)} for call in called], not called

    def reward(self, trajectory: dict[str, Any]) -> float:
        """Compare the last number of the last turn with the row's answer."""
        said = re.findall(r"-?\d+", trajectory["messages"][-1]["content"])
        return float(trajectory["stop"] == "stop" and said[-1:] == [self._answer])


def _question(asked: str) -> Message:
    return {"role": "user", "content": f"What is {asked}? Use the calculator."}


def _example(asked: str) -> list[Message]:
    call = {"name": "calculator", "arguments": {"sum": asked}}
    result = _result(call)
    return [
        _question(asked),
        {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


def _result(call: dict[str, Any]) -> str:
    """Return the sum, or what is wrong with the call: the policy may try again."""
    if call["name"] != "calculator":
        return f"error: there is no tool {call['name']!r}"
    asked = _SUM.fullmatch(str(call["arguments"].get("sum")))
    if asked is None:
        return "error: sum is two numbers with + or - between them"
    left, sign, right = asked.groups()
    return str(int(left) + (int(right) if sign == "+" else -int(right)))
