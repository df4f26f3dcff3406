"""Preparation and rewards without processes of their own: each job would wait for two or three."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tlt.actors.coordinator.preparation_process import Preparer
from tlt.preparation.prepare_job import prepare_or_refuse
from tlt.protocol.shared_values import PreparationExit
from tlt.rewards.process.request_scorer import RequestScorer, load_scorer
from tlt.rewards.process.weighted_rewards import Verdict, combine
from tlt.rewards.reward_messages import ScoreRequest, ScoreResult
from tlt.spec.reward import RewardSpec


class ThreadPreparer(Preparer):
    """Prepare jobs by the same code in a thread."""

    async def warm_up(self) -> None:
        """Have nothing to start."""

    async def _request(self, folder: Path, tries: int = 1) -> PreparationExit:
        prepared = await asyncio.to_thread(prepare_or_refuse, folder)
        return PreparationExit(code=0, result=prepared, last_line="")


class InlineRewards:
    """Score answers as `WeightedRewards` does, in the process that asks."""

    def __init__(self, specs: Sequence[RewardSpec], log: Path, workers: int = 8) -> None:
        self._specs = specs
        self._scorers: list[RequestScorer] = []

    async def start(self) -> None:
        self._scorers = [load_scorer(spec) for spec in self._specs]

    async def score(
        self,
        completion: str,
        answer: Any,
        row: dict[str, Any],
        known: Mapping[str, Callable[[], Any]] | None = None,
        extract: bool = False,
        sources: Collection[str] | None = None,
    ) -> Verdict:
        if not self._scorers:
            await self.start()
        computed = {name: compute() for name, compute in (known or {}).items()}
        request = ScoreRequest(
            completion=completion, answer=answer, row=row, known=computed, extract=extract
        )
        results = [
            scorer.score([request])[0] if spec.applies_to(sources) else ScoreResult()
            for spec, scorer in zip(self._specs, self._scorers, strict=True)
        ]
        return combine(self._specs, results, sources)

    async def stop(self) -> None:
        """Have nothing to stop."""
