"""Define what a scorer and the processes that run rewards exchange."""

from typing import Any

import msgspec


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    completion: str
    answer: Any
    row: dict[str, Any]
    # what else the verifier wants
    known: dict[str, Any] = {}
    # extract what the completion says in the end, too
    extract: bool = False


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """The reward, or None where the answer is to be left out."""

    reward: float | None = None
    error: str | None = None
    # what the completion says in the end, if that was asked for and the verifier looks for it
    final: str | None = None


class ScoreBatch(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    requests: list[ScoreRequest]


class BatchScores(msgspec.Struct, frozen=True, kw_only=True):
    # that of the batch: a result is never taken for another one's
    number: int
    results: list[ScoreResult]


class LoadedReward(msgspec.Struct, frozen=True, kw_only=True):
    # what the verifier wants to know beside completion, answer and row
    wanted: frozenset[str] = frozenset()
    # it scores several answers in one call
    batched: bool = False
