"""What every engine promises: requests go in, completions come out, tokens follow the policy.

An engine belongs to one rank and is driven by its loop. `step` advances every running request
by one decode step (or waits briefly where the engine runs on its own) and returns what ended.
Between two steps requests may be added or cancelled and the weights swapped.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import torch

from tlt.ids import Member, PolicyVersion, PromptIndex, Purpose, Step, StopReason
from tlt.protocol.records import StrategyTally
from tlt.protocol.refs import BatchSpan, DrafterSpan, OriginSpan, PolicySpan


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    # the same request gives the same tokens, whatever batch it sits in
    token_identical: bool
    swap_between_tokens: bool
    # `states` holds what the engine was told to capture
    hidden_states: bool
    trees: bool
    ngram: bool


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Temperature first (0 is greedy), then the filters, then the draw."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class NoiseKey(msgspec.Struct, frozen=True, kw_only=True):
    """With a position and a token id, this alone determines a draw; a retry reuses it."""

    seed: int
    step: Step
    purpose: Purpose
    prompt: PromptIndex
    member: Member


class Request(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    prompt: tuple[int, ...]
    key: NoiseKey
    sampling: Sampling
    max_new_tokens: int
    stop_tokens: frozenset[int]
    stop_strings: tuple[str, ...] = ()
    # higher ones start first
    priority: int = 0


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens` includes the stop token that ended it, if one did."""

    id: int
    tokens: list[int]
    # of each sampled token, after temperature and before filters
    logprobs: list[float]
    text: str
    stop: StopReason
    policies: tuple[PolicySpan, ...]
    drafters: tuple[DrafterSpan, ...]
    origins: tuple[OriginSpan, ...]
    batches: tuple[BatchSpan, ...]
    decode_seconds: float


class Engine(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def slots(self) -> int: ...

    @property
    def running(self) -> int:
        """Requests that were submitted and have neither ended nor been cancelled."""
        ...

    def submit(self, requests: Sequence[Request]) -> None: ...

    def cancel(self, ids: Sequence[int]) -> None:
        """Cancelled requests come out of the next step with stop reason `cancelled`."""
        ...

    def swap_weights(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> None:
        """From the next token on, sample from these weights (Hugging Face names)."""
        ...

    def step(self) -> list[Completion]: ...

    def index_answer(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """What was answered elsewhere: who guesses may guess from it."""
        ...

    def stop_speculating(self) -> None:
        """From the next step on, nothing is guessed."""
        ...

    def take_strategy_tallies(self) -> tuple[StrategyTally, ...]:
        """How it decoded since it was last asked."""
        ...

    def partial_answer(self, id: int) -> list[int] | None:
        """The tokens of an answer that is being written, if it has any yet."""
        ...

    def hidden_states(self, id: int) -> torch.Tensor:
        """[positions, captured layers, hidden] of a request that decodes or has just ended.

        One entry for each of its tokens, from the prompt's first on, but the newest: that one was
        drawn, and not yet fed. A view, which the next step overwrites.
        """
        ...

    def close(self) -> None: ...
