"""Answers in files of the run's folder: a reference names the file, the place and the checksum.

Each rank appends to a file of its own. Only those who need an answer's tokens or text read it: the
reward, the policy update, ranks that learn from it or copy n-grams, and the dashboard.
"""

import hashlib
import os
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from tlt.base.id_types import Digest
from tlt.errors import BlobError, BlobLost
from tlt.protocol.refs import (
    AnswerRef,
    BatchSpan,
    DrafterSpan,
    OriginSpan,
    PolicySpan,
    Value,
)

_DIGEST_BYTES = 12
_Span = TypeVar("_Span", PolicySpan, DrafterSpan, BatchSpan)
# of tokens that the policy has drawn, and of those that an environment has written
_ORIGINS = ("plain", "accepted", "corrected", "environment")
_ENVIRONMENT = _ORIGINS.index("environment")


class Turn(Value, frozen=True, kw_only=True, array_like=True):
    """A message of an answer that has several."""

    # as chat templates name it: assistant, tool, user
    role: str
    text: str


class Answer(Value, frozen=True, kw_only=True, array_like=True):
    """An answer's tokens, log-probs and text; the spans say where each token came from.

    Log-probs and spans are those of the policy's tokens. An answer may have others between its
    turns, written by an environment.
    """

    prompt: tuple[int, ...]
    # int32 and float32, little-endian; log-probabilities after temperature and before filters
    token_bytes: bytes
    logprob_bytes: bytes
    # of the policy's last turn
    text: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    policies: tuple[PolicySpan, ...]
    drafters: tuple[DrafterSpan, ...]
    # a byte for each token, because most spans are a token or two
    origin_bytes: bytes
    batches: tuple[BatchSpan, ...]
    # where an environment has a part in it: all messages, and the environment's reward
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    # why the environment gives none
    error: str | None = None
    # where an agent has held several conversations: the others
    branches: "tuple[Answer, ...]" = ()
    # what the environment has measured, by name
    metrics: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def policy_turns(self) -> tuple[tuple[int, int], ...]:
        """Return first and end of each run of the policy's tokens."""
        turns: list[tuple[int, int]] = []
        at = 0
        for is_drawn, group in groupby(self.origin_bytes, key=lambda code: code != _ENVIRONMENT):
            end = at + sum(1 for _ in group)
            if is_drawn:
                turns.append((at, end))
            at = end
        return tuple(turns)

    @property
    def tokens(self) -> list[int]:
        return unpack_tokens(self.token_bytes)

    @property
    def origins(self) -> tuple[OriginSpan, ...]:
        return tuple(
            OriginSpan(origin=_ORIGINS[code], tokens=sum(1 for _ in group))
            for code, group in groupby(self.origin_bytes)
        )

    @property
    def logprobs(self) -> list[float]:
        return np.frombuffer(self.logprob_bytes, dtype="<f4").tolist()

    def first(self, tokens: int) -> "Answer":
        """Return the first tokens alone, without their text."""
        tokens = max(0, tokens)
        if tokens >= len(self.origin_bytes):
            return self
        return msgspec.structs.replace(
            self,
            token_bytes=self.token_bytes[: 4 * tokens],
            logprob_bytes=self.logprob_bytes[: 4 * tokens],
            text="",
            policies=_first(self.policies, tokens),
            drafters=_first(self.drafters, tokens),
            origin_bytes=self.origin_bytes[:tokens],
            batches=_first(self.batches, tokens),
        )


def _first(spans: tuple[_Span, ...], tokens: int) -> tuple[_Span, ...]:
    found: list[_Span] = []
    for span in spans:
        if tokens > 0:
            found.append(msgspec.structs.replace(span, tokens=min(span.tokens, tokens)))
        tokens -= span.tokens
    return tuple(found)


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Answer)


def pack_tokens(tokens: Iterable[int]) -> bytes:
    return np.fromiter(tokens, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype="<i4").tolist()


def pack_origins(origins: Iterable[OriginSpan]) -> bytes:
    return b"".join(bytes([_ORIGINS.index(span.origin)]) * span.tokens for span in origins)


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    return np.fromiter(logprobs, dtype="<f4").tobytes()


class AnswerWriter:
    """Appends to one file; nobody else does."""

    def __init__(self, folder: Path, name: str) -> None:
        """Create the file with the first answer."""
        self._folder = folder
        self._name = name

    def append(self, answer: Answer) -> AnswerRef:
        """Write and close: other hosts that mount the folder see a file once it is closed."""
        data = _encode(answer)
        path = self._folder / self._name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(path, "ab", buffering=0) as file:
                offset = file.seek(0, os.SEEK_END)
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
        except OSError as error:
            raise BlobError(f"{path}: cannot be written: {error.strerror}") from error
        return AnswerRef(file=self._name, offset=offset, bytes=len(data), digest=_digest(data))


class AnswerFiles:
    """The answers of a run."""

    def __init__(self, run: Path) -> None:
        self.folder = run / "answers"

    def writer(self, name: str) -> AnswerWriter:
        return AnswerWriter(self.folder, name)

    def read(self, ref: AnswerRef) -> Answer:
        """Return an intact answer, or raise BlobLost."""
        path = self.folder / ref.file
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                data = os.pread(file.fileno(), min(ref.bytes, size), ref.offset)
        except OSError as error:
            raise BlobLost(f"{path}: cannot be read: {error.strerror}") from error
        if len(data) != ref.bytes or _digest(data) != ref.digest:
            raise BlobLost(f"{path}: the {ref.bytes} bytes at {ref.offset} are not the answer")
        try:
            return _decoder.decode(data)
        except ValueError as error:  # msgspec's own, or text that is not UTF-8
            raise BlobLost(f"{path}: the bytes at {ref.offset} cannot be read: {error}") from error

    def sync(self, refs: Iterable[AnswerRef]) -> None:
        """Wait until the answers would survive a crash of the machine."""
        for name in {ref.file for ref in refs}:
            path = self.folder / name
            try:
                with open(path, "rb", buffering=0) as file:
                    os.fsync(file.fileno())
            except OSError as error:
                raise BlobLost(f"{path}: cannot be read: {error.strerror}") from error


def _digest(data: bytes) -> Digest:
    return Digest(hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest())
