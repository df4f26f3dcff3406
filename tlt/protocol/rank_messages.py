"""Messages between a worker and its ranks that are neither commands nor events.

A rank also receives the worker's commands unchanged and reports events. Tensors are in files.
"""

from typing import Any, TypeAlias

import msgspec

from tlt.base.id_types import (
    Count,
    Incarnation,
    JobName,
    Member,
    PromptIndex,
    Purpose,
    Step,
    StopReason,
    WorkerId,
)
from tlt.protocol.commands import PromptIssued, RankCommand
from tlt.protocol.events import RankEvent
from tlt.protocol.refs import AnswerRef, Value


class RankSetup(Value, frozen=True, kw_only=True):
    """The identity and device of a rank; an argument of the rank's process."""

    worker: WorkerId
    incarnation: Incarnation
    # index among the ranks of its worker
    rank: Count
    device: str
    host: str
    # the session's folder in shared memory, in which each job has a folder of its own
    flight: str
    # by rank of its worker: the cores that it may use
    cores: tuple[tuple[Count, ...], ...] = ()


class RankMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A message between a worker and its ranks that is neither a command nor an event."""


class RankReady(RankMessage, frozen=True, kw_only=True):
    """The rank has started; other ranks can meet at its torch.distributed store."""

    rendezvous: str


class DecodePrompts(RankMessage, frozen=True, kw_only=True):
    """Prompts for this rank to answer."""

    job: JobName
    prompts: tuple[PromptIssued, ...]


class AboutAnswer(RankMessage, frozen=True, kw_only=True):
    """A message about one answer."""

    job: JobName
    step: Step
    purpose: Purpose
    prompt: PromptIndex
    member: Member


class BeginTrajectory(RankMessage, frozen=True, kw_only=True):
    """A prompt for this rank to answer in turns with an environment.

    A branch begins another conversation within the answer.
    """

    job: JobName
    prompt: PromptIssued
    branch: Count = 0
    # what the policy sees first, instead of the row's own prompt, and its tools
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    # the same in tokens
    tokens: tuple[Count, ...] | None = None
    # limit of the turn
    most_tokens: Count | None = None
    # why the answer can't begin
    error: str | None = None


class TurnFinished(AboutAnswer, frozen=True, kw_only=True):
    """The policy's turn is over; the rank waits for what the environment says."""

    # with special tokens, but for the one that ends it
    text: str
    # what the template wrote before it opens a thought
    in_thought: bool = False
    # "length": there is no room for another turn
    stop: StopReason
    # reason why the rank can't go on at all
    error: str | None = None
    # for agents: the turn, and the tokens that the rank has added before it
    added: tuple[Count, ...] = ()
    tokens: tuple[Count, ...] = ()
    logprobs: tuple[float, ...] = ()


class ContinueTrajectory(AboutAnswer, frozen=True, kw_only=True):
    """The environment's messages, which the policy answers next."""

    branch: Count = 0
    messages: list[dict[str, Any]]
    # the same in tokens
    tokens: tuple[Count, ...] | None = None
    # limit of the turn
    most_tokens: Count | None = None


class EndTrajectory(AboutAnswer, frozen=True, kw_only=True):
    """The last messages of an answer, which the policy doesn't see, and its reward."""

    messages: list[dict[str, Any]]
    stop: StopReason
    reward: float | None
    error: str | None
    # what the environment has measured, by name
    metrics: dict[str, float] = {}


class PeerAnswer(AboutAnswer, frozen=True, kw_only=True):
    """Another rank's answer to a prompt."""

    answer: AnswerRef


class PartialAnswer(AboutAnswer, frozen=True, kw_only=True):
    """The tokens so far of an answer that a rank is writing."""

    prompt_tokens: tuple[Count, ...]
    # packed; nobody would delete a file of unfinished answers
    token_bytes: bytes

    def __post_init__(self) -> None:
        if len(self.token_bytes) % 4:
            raise ValueError("token_bytes must hold whole numbers of four bytes")


class SharePartialAnswers(RankMessage, frozen=True, kw_only=True):
    """A request for the answers that this rank is writing: idle ranks learn from them."""

    job: JobName


class PartialAnswers(RankMessage, frozen=True, kw_only=True):
    """Answers that a rank is writing."""

    job: JobName
    answers: tuple[PartialAnswer, ...]


ToRank: TypeAlias = (
    RankCommand
    | DecodePrompts
    | BeginTrajectory
    | ContinueTrajectory
    | EndTrajectory
    | PeerAnswer
    | PartialAnswer
    | SharePartialAnswers
)
FromRank: TypeAlias = RankEvent | RankReady | PartialAnswers | TurnFinished
