"""A calculator that the tiny reasoner may call: it writes ":12+34" and gets "=46;"."""

import re
from typing import Any

_CALL = re.compile(r":(\d{2}(?:\+\d{2})*)")


class Calculator:
    """Adds modulo 100 what the policy asks it to; without a call, the answer is done."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        self.row = row

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, str]], bool]:
        if not message["content"].startswith(":"):
            return [], True
        call = _CALL.fullmatch(message["content"])
        said = f"{sum(map(int, call[1].split('+'))) % 100:02d}" if call else "?"
        return [{"role": "tool", "content": f"={said};"}], False

    def reward(self, trajectory: dict[str, Any]) -> float:
        """Compare what follows the last # with the row's answer."""
        _, mark, said = trajectory["messages"][-1]["content"].rpartition("#")
        return float(bool(mark) and said == self.row["answer"])
