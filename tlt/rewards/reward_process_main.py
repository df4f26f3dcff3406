"""Run users' reward code in a process that may be killed.

Started as `python -m tlt.rewards.reward_process_main FD`.

Each request gets one result; an exception is a result. Messages are JSON, because a row's integers
may be longer than MessagePack's.
"""

import math
import socket
import struct
import sys
from typing import Any

import msgspec

from tlt.config import RewardSpec
from tlt.errors import ConfigError
from tlt.rewards.verifiers import Verifier, load_verifier, wanted_by

LENGTH = struct.Struct("<Q")


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    completion: str
    answer: Any
    row: dict[str, Any]
    # what else the verifier wants
    known: dict[str, Any] = {}


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True):
    reward: float = 0.0
    error: str | None = None
    # the verifier cannot be loaded, so no answer will ever be scored
    fatal: bool = False
    # of the first result: what the verifier wants to know beside completion, answer and row
    wanted: frozenset[str] = frozenset()


def score(verifier: Verifier, request: ScoreRequest) -> ScoreResult:
    try:
        reward = float(verifier(request.completion, request.answer, request.row, **request.known))
    except Exception as error:  # raised by the user's code
        return ScoreResult(error=" ".join(f"{type(error).__name__}: {error}".split()))
    if not math.isfinite(reward):
        return ScoreResult(error=f"the reward is {reward}")
    return ScoreResult(reward=reward)


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    stream = link.makefile("rwb")
    decoder = msgspec.json.Decoder(ScoreRequest)
    spec = msgspec.json.decode(_read(stream), type=RewardSpec)
    try:
        verifier = load_verifier(spec)
    except ConfigError as error:
        _write(stream, ScoreResult(error=str(error), fatal=True))
        return
    _write(stream, ScoreResult(wanted=wanted_by(verifier)))
    while body := _read(stream):
        _write(stream, score(verifier, decoder.decode(body)))


def _read(stream: Any) -> bytes:
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def _write(stream: Any, result: ScoreResult) -> None:
    body = msgspec.json.encode(result)
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


if __name__ == "__main__":
    main()
