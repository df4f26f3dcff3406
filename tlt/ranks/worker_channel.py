"""What a worker and its ranks say to each other: length-prefixed frames over a socket pair.

A frame's tensors are small or refer to blobs. This module is shared with the worker's actor and
imports nothing that computes.
"""

import asyncio
import mmap
import select
import socket
import struct
from collections.abc import Generator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TypeAlias

import msgspec

from tlt.config import JobSpec
from tlt.errors import RankError
from tlt.ids import (
    Epoch,
    Incarnation,
    JobId,
    Member,
    PolicyVersion,
    PromptIndex,
    Purpose,
    Step,
    WorkerId,
)
from tlt.protocol.commands import MergeDrafter, PromptIssued, TrainDrafter, UpdatePolicy
from tlt.protocol.events import (
    DecodingReported,
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterRefused,
    RolloutFinished,
)
from tlt.protocol.records import UpdateMetrics
from tlt.protocol.refs import Checkpoint, DrafterRef, PolicyRef, Tensor


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Load(Frame, frozen=True, kw_only=True):
    job: JobId
    epoch: Epoch
    spec: JobSpec
    worker: WorkerId
    incarnation: Incarnation
    # of its worker's
    rank: int
    # where this job's blobs lie, in flight and committed
    flight: str
    committed: str


class Unload(Frame, frozen=True, kw_only=True):
    job: JobId


class SwapPolicy(Frame, frozen=True, kw_only=True):
    job: JobId
    policy: PolicyRef


class Decode(Frame, frozen=True, kw_only=True):
    prompts: tuple[PromptIssued, ...]


class PeerAnswer(Frame, frozen=True, kw_only=True):
    """What another rank answered to one of the job's prompts, or has by now."""

    job: JobId
    step: Step
    purpose: Purpose
    prompt: PromptIndex
    member: Member
    prompt_tokens: tuple[int, ...]
    tokens: Tensor
    whole: bool


class School(Frame, frozen=True, kw_only=True):
    """Train the drafter from now on, or go on from this trunk."""

    train: TrainDrafter


class Dismiss(Frame, frozen=True, kw_only=True):
    job: JobId
    training_session: int
    # by the clock that all processes of a host share
    sent: float


class Merge(Frame, frozen=True, kw_only=True):
    merge: MergeDrafter


class SwapDrafter(Frame, frozen=True, kw_only=True):
    job: JobId
    # None: what the spec names
    drafter: DrafterRef | None


class SharePartialAnswers(Frame, frozen=True, kw_only=True):
    """What is being written now: others, who are idle, learn from it."""

    job: JobId


class Plain(Frame, frozen=True, kw_only=True):
    """Decode without speculation from now on."""

    job: JobId


class Train(Frame, frozen=True, kw_only=True):
    """`samples` holds this rank's rollouts, by minibatch, in the order of its shares."""

    learn: UpdatePolicy
    local_rank: int
    samples: tuple[tuple[RolloutFinished, ...], ...]


class Ready(Frame, frozen=True, kw_only=True):
    rendezvous: str


class Trained(Frame, frozen=True, kw_only=True):
    learn: UpdatePolicy
    version: PolicyVersion
    seconds: float
    # from the first rank of all
    policy: PolicyRef | None
    metrics: UpdateMetrics | None
    checkpoint: Checkpoint | None


class Dismissed(Frame, frozen=True, kw_only=True):
    """It trains the drafter no more."""

    job: JobId
    training_session: int
    # since it was told so
    seconds: float
    dropped_seconds: float
    typical_seconds: float


class PartialAnswers(Frame, frozen=True, kw_only=True):
    """Answers that are being written, by this rank or another one."""

    job: JobId
    answers: tuple[PeerAnswer, ...]


class Refused(Frame, frozen=True, kw_only=True):
    """The job cannot be run like this; trying again would not help."""

    job: JobId
    error: str


ToRank: TypeAlias = (
    Load
    | Unload
    | SwapPolicy
    | SwapDrafter
    | Decode
    | PeerAnswer
    | SharePartialAnswers
    | School
    | Merge
    | Dismiss
    | Plain
    | Train
)
FromRank: TypeAlias = (
    Ready
    | RolloutFinished
    | DecodingReported
    | DrafterRefused
    | DrafterDeltaReady
    | DrafterMerged
    | DrafterDiverged
    | Dismissed
    | PartialAnswers
    | Trained
    | Refused
)

_URGENT = (Load, Unload, Decode, Dismiss, Train)
_LENGTH = struct.Struct("<Q")
_encode = msgspec.msgpack.Encoder().encode
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def pack(frame: ToRank | FromRank) -> bytes:
    body = _encode(frame)
    return _LENGTH.pack(len(body)) + body


async def read_from_rank(reader: asyncio.StreamReader) -> FromRank:
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return _from_rank.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise RankError("the rank hung up") from error


class RankChannel:
    """The rank's end: it looks for commands between two computations and never waits in one."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._buffer = bytearray()
        self._waiting: list[ToRank] = []

    def send(self, frame: FromRank) -> None:
        self._socket.sendall(pack(frame))

    def receive(self, *, wait: float | None) -> list[ToRank]:
        """What has arrived, or arrives within so many seconds, or ever (None).

        EOFError: the worker is gone.
        """
        frames, self._waiting = self._waiting, []
        frames += self._frames()
        while not frames and self._readable(wait):
            self._read()
            frames = self._frames()
        return frames

    def commanded(self) -> bool:
        """Whether something has arrived that cannot wait until a micro-batch is done."""
        while self._readable(0.0):
            self._read()
        self._waiting += self._frames()
        return any(isinstance(frame, _URGENT) for frame in self._waiting)

    def _read(self) -> None:
        try:
            chunk = self._socket.recv(1 << 20)
        except ConnectionError as error:
            raise EOFError from error  # who looks in the middle of a file takes it for no bad file
        if not chunk:
            raise EOFError
        self._buffer += chunk

    def _readable(self, wait: float | None) -> bool:
        return bool(select.select([self._socket], [], [], wait)[0])

    def _frames(self) -> list[ToRank]:
        frames: list[ToRank] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(_to_rank.decode(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return frames


_PULSE_SECONDS = 0.5


class Progress:
    """Two numbers in memory that a rank shares with its worker: work done, requests running."""

    _LAYOUT = struct.Struct("<QQ")
    SIZE = _LAYOUT.size

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, self.SIZE)
        self._done = 0

    def report(self, running: int) -> None:
        self._done += 1
        self._LAYOUT.pack_into(self._memory, 0, self._done, running)

    @contextmanager
    def made(self) -> Generator[None]:
        """Inside is something that takes its time, and cannot say so itself."""
        over = Event()

        def report() -> None:
            while not over.wait(_PULSE_SECONDS):
                self.report(0)

        pulse = Thread(target=report, daemon=True)
        pulse.start()
        try:
            yield
        finally:
            over.set()
            pulse.join()

    def read(self) -> tuple[int, int]:
        done, running = self._LAYOUT.unpack_from(self._memory)
        return done, running
