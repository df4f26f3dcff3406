"""The protocol of a policy that chooses how decode steps guess.

A policy is asked once for a run of steps, and is told afterwards what the run cost. Between the two
it isn't consulted, so that choosing takes no time from short steps.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from tlt.base.strategies import Strategy

ChoiceReason = Literal["best", "explore", "only", "control"]


class Choice(NamedTuple):
    strategy: Strategy
    # tokens per second
    predicted: float
    why: ChoiceReason
    # decode steps that it holds for, unless the batch size changes much
    steps: int = 1


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
    proposal_seconds: float = 0.0
    # both are empty if the strategy proposes nothing
    reached: Sequence[int] = ()
    accepted: Sequence[int] = ()
    # drafts that each row verified, if fewer than the strategy allows
    width: int | None = None


class RunObservation(NamedTuple):
    """Consecutive steps with one strategy: means of a step, and sums of the counts."""

    strategy: Strategy
    steps: int
    batch: float
    context: float
    # of the pass, in steps that verified as many drafts as the strategy allows; 0 without any
    full_passes: int
    pass_seconds: float
    # without the first step of a run, which catches up with what the proposer missed
    proposals: int
    proposal_seconds: float
    # of all steps together
    seconds: float
    reached: Sequence[int]
    accepted: Sequence[int]


def bucket_of(batch: float) -> int:
    """Return the power of two that stands for this batch size: the next one at or above it."""
    return 1 << (max(1, round(batch)) - 1).bit_length()


def rows_by_depth(counts: Sequence[int], depth: int) -> list[int]:
    """Return how many of the counts exceed each number below `depth`."""
    rows = [0] * (depth + 1)
    for count in counts:
        rows[min(count, depth)] += 1
    above = len(counts)
    return [above := above - fewer for fewer in rows[:depth]]


class StrategyPolicy(Protocol):
    def set_strategies(self, strategies: Sequence[Strategy]) -> None:
        """Set the strategies to choose from; knowledge of others is kept."""
        ...

    def choose(self, batch: int, context: int, random: float) -> Choice:
        """Choose for `context` tokens in all rows together, with a `random` in [0, 1)."""
        ...

    def observe(self, run: RunObservation) -> None:
        """Learn from a run; runs from before the first choice are allowed."""
        ...

    def handle_drafter_swap(self) -> None: ...

    def handle_weight_swap(self) -> None: ...
