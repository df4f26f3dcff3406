"""Environments for `benchmarks.environments`: their processes import nothing else of it."""

import asyncio
from typing import Any


class Instant:
    """Lets the policy go on as long as it works."""

    seconds = 0.0

    def reset(self, row: dict[str, Any], seed: int) -> None:
        self._answer = row["answer"]

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, str]], bool]:
        await asyncio.sleep(self.seconds)
        return [], not message["content"].endswith(";")

    def reward(self, trajectory: dict[str, Any]) -> float:
        return float(trajectory["messages"][-1]["content"].endswith(f"#{self._answer}"))


class Waiting(Instant):
    seconds = 2.0
