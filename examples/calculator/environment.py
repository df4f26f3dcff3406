"""A calculator that the tiny reasoner may ask for a step: it writes "12+34>" and gets "46;"."""

import re
from typing import Any

_ASKED = re.compile(r"(\d\d)\+(\d\d)>")


class Calculator:
    """Answers an open step; one that the policy has worked out goes on without a word."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        self._answer = row["answer"]

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, str]], bool]:
        if not message["content"].endswith(">"):
            return [], True
        asked = _ASKED.fullmatch(message["content"][-6:])
        if asked is None:
            return [], False
        return [{"role": "tool", "content": f"{(int(asked[1]) + int(asked[2])) % 100:02d};"}], False

    def reward(self, trajectory: dict[str, Any]) -> float:
        """Compare what follows the last # with the row's answer."""
        _, mark, said = trajectory["messages"][-1]["content"].rpartition("#")
        return float(bool(mark) and said == self._answer)
