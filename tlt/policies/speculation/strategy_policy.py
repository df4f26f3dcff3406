"""The protocol of a policy that chooses how each decode step guesses."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from tlt.strategies import Strategy

ChoiceReason = Literal["best", "explore", "only", "control"]


class Choice(msgspec.Struct, frozen=True):
    strategy: Strategy
    # tokens per second
    predicted: float
    why: ChoiceReason


class StepObservation(NamedTuple):
    """One decode step: its cost, and how many drafts it accepted.

    `reached[j]` counts the rows whose first j drafts were all accepted, `accepted[j]` those of them
    that accepted the next draft too. A row without a draft counts as one that rejected it.
    """

    strategy: Strategy
    batch: int
    # tokens of all running rows together
    context: int
    # of the whole step
    seconds: float
    # of the step's part before the policy's own pass
    proposal_seconds: float
    # both are empty if the strategy proposes nothing
    reached: Sequence[int]
    accepted: Sequence[int]
    # drafts that each row verified, if fewer than the strategy allows
    width: int | None = None


def bucket_of(batch: int) -> int:
    """Return the power of two that stands for this batch size: the next one at or above it."""
    return 1 << (batch - 1).bit_length()


class StrategyPolicy(Protocol):
    """Choose a strategy and observe its step, once per decode step.

    Observations from before the first choice are allowed.
    """

    def set_strategies(self, strategies: Sequence[Strategy]) -> None:
        """Set the strategies to choose from; knowledge of others is kept."""
        ...

    def choose(self, batch: int, context: int, random: float) -> Choice:
        """Choose for `context` tokens in all rows together, with a `random` in [0, 1)."""
        ...

    def observe(self, step: StepObservation) -> None: ...

    def observe_probe(
        self, strategy: Strategy, batch: int, reached: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Observe the drafts that a strategy would have had accepted while another one decoded."""
        ...

    def handle_drafter_swap(self) -> None: ...

    def handle_weight_swap(self) -> None: ...
