"""The example's calculators answer what they are asked, and say what is wrong with a call."""

import random
import re
from typing import Any

import pytest

from examples.calculator.chat import ChatCalculator
from examples.calculator.environment import Calculator
from examples.tiny_reasoner.task import draw_problem, worked_solution

_STEP = re.compile(r"(\d\d\+\d\d):([^;]*;)")
_ROW = {"question": "State the answer: 71 - 26 =", "answer": "45"}


def test_works_a_step_out_as_the_reasoner_does() -> None:
    rng = random.Random(0)
    for _ in range(50):
        for asked, worked in _STEP.findall(worked_solution(draw_problem(rng), rng)):
            said, is_done = Calculator().step({"content": f"46;{asked}>"})
            assert said == [{"role": "tool", "content": worked}]
            assert not is_done


def test_says_nothing_where_the_reasoner_worked_it_out() -> None:
    assert Calculator().step({"content": "12+34:2+4=06,1+3+0=04>"}) == ([], False)
    assert Calculator().step({"content": "46;#46"}) == ([], True)


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("calculator", {"sum": "71 - 26"}, "45"),
        ("calculator", {"sum": "71+26"}, "97"),
        ("calculator", {"sum": 71}, "error: sum is two numbers with + or - between them"),
        ("calculator", {}, "error: sum is two numbers with + or - between them"),
        ("adder", {"sum": "71 - 26"}, "error: there is no tool 'adder'"),
    ],
)
def test_a_call_of_the_tool(name: str, arguments: dict[str, Any], result: str) -> None:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    said, is_done = ChatCalculator().step({"content": "", "tool_calls": [call]})
    assert said == [{"role": "tool", "content": result}]
    assert not is_done


@pytest.mark.parametrize(("last", "reward"), [("45", 1.0), ("71 - 26 = 45", 1.0), ("45 - 71", 0.0)])
def test_the_last_number_counts(last: str, reward: float) -> None:
    environment = ChatCalculator()
    messages, tools = environment.reset(_ROW, seed=1)
    assert messages[-1]["content"] == "What is 71 - 26? Use the calculator."
    assert [tool["function"]["name"] for tool in tools] == ["calculator"]
    assert environment.step({"content": last}) == ([], True)
    said = [*messages, {"role": "assistant", "content": last}]
    assert environment.reward({"messages": said, "stop": "stop"}) == reward
    assert environment.reward({"messages": said, "stop": "turns"}) == 0.0
