"""Score an answer with all rewards of a spec, and add them up by their weights."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tlt.rewards.process.reward_pool import RewardPool
from tlt.rewards.reward_messages import ScoreResult
from tlt.spec.reward import EXTRACTING, RewardSpec


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The sum of the rewards that apply, or None where the answer is left out."""

    reward: float | None = None
    error: str | None = None
    # of several rewards: what each gave, in the order of the spec
    parts: tuple[float | None, ...] = ()
    # the answer is right; None where it is left out
    correct: bool | None = None
    # what the answer says in the end, by the first reward that extracts it
    final: str | None = None


class WeightedRewards:
    """Score answers with processes that end with the thread that starts them."""

    def __init__(self, specs: Sequence[RewardSpec], log: Path, workers: int = 8) -> None:
        self._pools = [
            EnvironmentRewards(spec)
            if spec.kind == "environment"
            else RewardPool(spec, log, workers)
            for spec in specs
        ]

    async def start(self) -> None:
        """Load the rewards; raise ConfigError if one can't be loaded."""
        for pool in self._pools:
            await pool.start()

    async def score(
        self,
        completion: str,
        answer: Any,
        row: dict[str, Any],
        known: Mapping[str, Callable[[], Any]] | None = None,
        extract: bool = False,
        sources: Collection[str] | None = None,
    ) -> Verdict:
        """Score with all rewards of the sources at once; `known` is what they may ask for besides.

        `extract` asks for what the answer says in the end.
        """

        async def score_with(pool: RewardPool | EnvironmentRewards) -> ScoreResult:
            if not pool.spec.applies_to(sources):
                return ScoreResult()
            return await pool.score(completion, answer, row, known, extract)

        results = await asyncio.gather(*map(score_with, self._pools))
        return combine([pool.spec for pool in self._pools], results, sources)

    async def stop(self) -> None:
        for pool in self._pools:
            await pool.stop()


class EnvironmentRewards:
    """Passes on what an environment said when the answer was written."""

    def __init__(self, spec: RewardSpec) -> None:
        self.spec = spec

    async def start(self) -> None:
        pass

    async def score(
        self,
        completion: str,
        answer: Any,
        row: dict[str, Any],
        known: Mapping[str, Callable[[], Any]] | None = None,
        extract: bool = False,
    ) -> ScoreResult:
        if known is None or "environment" not in known:
            return ScoreResult(error="only a job knows what its environment says")
        reward, error = known["environment"]()
        return ScoreResult(reward=self.spec.on_error if error else reward, error=error)

    async def stop(self) -> None:
        pass


def combine(
    specs: Sequence[RewardSpec],
    results: Sequence[ScoreResult],
    sources: Collection[str] | None = None,
) -> Verdict:
    """Leave an answer out if a reward failed without a fallback, or if none applies."""
    parts = tuple(result.reward for result in results)
    errors = [
        f"{spec.label}: {result.error}" if len(specs) > 1 else result.error
        for spec, result in zip(specs, results, strict=True)
        if result.error is not None
    ]
    failed = any(r.error is not None and r.reward is None for r in results)
    total: float | None = None
    if not failed and any(part is not None for part in parts):
        weighted = zip(specs, parts, strict=True)
        total = sum(spec.weight * part for spec, part in weighted if part is not None)
    return Verdict(
        reward=total,
        error="; ".join(errors) or None,
        parts=parts if len(specs) > 1 else (),
        correct=None if total is None else _is_correct(specs, parts, total),
        final=next(
            (
                result.final
                for spec, result in zip(specs, results, strict=True)
                if spec.kind in EXTRACTING and spec.applies_to(sources)
            ),
            None,
        ),
    )


def _is_correct(specs: Sequence[RewardSpec], parts: Sequence[float | None], total: float) -> bool:
    """Ask all rewards that decide on it and apply, or else whether they give 1 in all."""
    decided = [
        part >= spec.least_correct
        for spec, part in zip(specs, parts, strict=True)
        if part is not None and spec.least_correct is not None
    ]
    return all(decided) if decided else total >= 1.0
