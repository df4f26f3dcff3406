"""The protocol that every engine implements: requests go in, completions come out.

A drafter is trained from what an engine offers beyond that: token states, embedding and head.
Tokens follow the policy's distribution. An engine belongs to one rank, whose loop calls `step`;
between two steps requests may be added or cancelled and weights swapped.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import torch

from tlt.base.id_types import (
    DrafterVersion,
    Member,
    PolicyVersion,
    PromptIndex,
    Purpose,
    Step,
    StopReason,
)
from tlt.models.eagle_drafter import Drafter
from tlt.protocol.refs import BatchSpan, DrafterSpan, OriginSpan, PolicySpan
from tlt.protocol.shared_values import StrategyTally


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    # the same request gives the same tokens in any batch and with any strategy
    token_identical: bool
    # proposals may be drawn with the noise that the policy draws with
    shared_noise: bool
    hidden_states: bool


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a draw: temperature first (0 is greedy), then the filters, then the draw."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class NoiseKey(msgspec.Struct, frozen=True, kw_only=True):
    """The key of an answer's noise: with a position and a token id it determines each draw."""

    seed: int
    step: Step
    purpose: Purpose
    prompt: PromptIndex
    member: Member
    # of the conversation, where an answer has several
    branch: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    prompt: tuple[int, ...]
    key: NoiseKey
    sampling: Sampling
    max_new_tokens: int
    stop_tokens: frozenset[int]
    stop_strings: tuple[str, ...] = ()
    # another request may begin with all of its tokens
    goes_on: bool = False


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """An answer; `tokens` includes the stop token that ended it, if one did."""

    id: int
    tokens: list[int]
    # log-prob of each token, after temperature and before filters
    logprobs: list[float]
    text: str
    stop: StopReason
    policies: tuple[PolicySpan, ...]
    drafters: tuple[DrafterSpan, ...]
    origins: tuple[OriginSpan, ...]
    batches: tuple[BatchSpan, ...]
    decode_seconds: float
    # how often it was put off for lack of memory, and its tokens were read again
    retractions: int = 0


class Engine(Protocol):
    @property
    def capabilities(self) -> Capabilities:
        """Declare what this engine can do beyond decoding."""
        ...

    @property
    def version(self) -> PolicyVersion:
        """Return the version of the policy that decodes."""
        ...

    @property
    def policy_bytes(self) -> int:
        """Return the size of the policy's weights."""
        ...

    @property
    def slots(self) -> int:
        """Return how many requests decode at once, at most."""
        ...

    @property
    def running(self) -> int:
        """Count the submitted requests that have neither ended nor been cancelled."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all requests, or raise ConfigError and queue none if one is invalid."""
        ...

    def cancel(self, ids: Sequence[int]) -> None:
        """Make the next step return these requests with the stop reason `cancelled`."""
        ...

    def swap_weights(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> None:
        """Sample from these weights (Hugging Face names) from the next token on."""
        ...

    def step(self) -> list[Completion]:
        """Advance all running requests by one decode step, or wait briefly for an asynchronous
        scheduler, and return what ended."""
        ...

    def index_answer(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Add an answer that another engine decoded to the index that n-grams propose from."""
        ...

    def allow_speculation(self, allowed: bool) -> None:
        """Decode without drafts while it isn't allowed; afterwards, choose strategies anew."""
        ...

    def release_memory(self) -> None:
        """Free what only requests need, until the next one, unless some are running.

        The hidden states of requests that have ended are lost.
        """
        ...

    def set_capturing(self, capture: bool) -> None:
        """Keep hidden states for drafter training, or only those that proposing needs."""
        ...

    def take_strategy_tallies(self) -> tuple[StrategyTally, ...]:
        """Return what each strategy decoded since the last call."""
        ...

    def partial_answer(self, id: int) -> list[int] | None:
        """Return the tokens so far of a request that decodes now, or None if they are unknown."""
        ...

    def hidden_states(self, id: int) -> torch.Tensor:
        """Return [positions, captured layers, hidden] of a request that decodes or has just ended.

        The positions are those of its tokens from the prompt's first on, but for the newest token,
        which was sampled but not yet decoded. The next step overwrites this view.
        """
        ...

    @property
    def token_state_example(self) -> torch.Tensor:
        """Return a tensor with the shape and dtype of one token's captured states."""
        ...

    @property
    def embedding_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the policy's embedding and head; new weights are written into them."""
        ...

    def compute_hidden_states(
        self, tokens: Sequence[int], check_interrupt: Callable[[], None]
    ) -> torch.Tensor:
        """Return what `hidden_states` would for a prompt and answer, while nothing runs.

        `check_interrupt` is called meanwhile and may raise.
        """
        ...

    @property
    def drafter_version(self) -> DrafterVersion | None:
        """Return the version of the drafter that proposes, or None without one."""
        ...

    def adopt_drafter(self, version: DrafterVersion, drafter: Drafter) -> None:
        """Propose with this drafter from the next step on; raise ConfigError if it doesn't fit."""
        ...

    def drop_drafter(self) -> None:
        """Propose with no drafter from the next step on."""
        ...

    def close(self) -> None:
        """Free everything; the engine cannot be used afterwards."""
        ...
