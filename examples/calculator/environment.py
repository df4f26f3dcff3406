"""A calculator that works a step out for the tiny reasoner where it writes "12+34>"."""

import re
from typing import Any

_ASKED = re.compile(r"(\d)(\d)\+(\d)(\d)>")


class Calculator:
    """Works an open step out; one that the policy has worked out goes on without a word."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        self._answer = row["answer"]

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, str]], bool]:
        if not message["content"].endswith(">"):
            return [], True
        asked = _ASKED.fullmatch(message["content"][-6:])
        if asked is None:
            return [], False
        return [{"role": "tool", "content": _worked(*map(int, asked.groups()))}], False

    def reward(self, trajectory: dict[str, Any]) -> float:
        """Compare what follows the last # with the row's answer."""
        _, mark, said = trajectory["messages"][-1]["content"].rpartition("#")
        return float(bool(mark) and said == self._answer)


def _worked(left_ten: int, left: int, right_ten: int, right: int) -> str:
    """Return "2+4=06,1+3+0=04>46;" for 12+34, digit by digit as the policy does it."""
    ones = left + right
    tens = left_ten + right_ten + ones // 10
    work = f"{left}+{right}={ones:02d},{left_ten}+{right_ten}+{ones // 10}={tens:02d}"
    return f"{work}>{(10 * tens + ones % 10) % 100:02d};"
