"""Define what a scorer and the processes that run rewards exchange: JSON with its length before it.

It is JSON, because a row's integers may be longer than MessagePack's.
"""

import struct
from typing import Any

import msgspec

from tlt.spec.reward import RewardSpec

LENGTH = struct.Struct("<Q")


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


class Start(msgspec.Struct, frozen=True, kw_only=True):
    reward: RewardSpec
    # the one folder that it may always write to
    folder: str


class Started(msgspec.Struct, frozen=True, kw_only=True):
    # the verifier can't be loaded, so no answer will ever be scored
    error: str | None = None
    # what the verifier wants to know beside completion, answer and row
    wanted: frozenset[str] = frozenset()
    batched: bool = False
    # limits that this host doesn't have
    lacks: tuple[str, ...] = ()


def framed(message: msgspec.Struct) -> bytes:
    body = msgspec.json.encode(message)
    return LENGTH.pack(len(body)) + body
