"""What is asked of a policy that chooses how each round decodes."""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from tlt.strategies import Strategy

ChoiceReason = Literal["best", "explore", "only", "control"]


class Choice(msgspec.Struct, frozen=True):
    strategy: Strategy
    # tokens per second
    predicted: float
    why: ChoiceReason


def bucket_of(batch: int) -> int:
    """Batch sizes up to the same power of two are taken together."""
    return 1 << (batch - 1).bit_length()


class StrategyPolicy(Protocol):
    """`choose`, then `observe` of what was done, once a round. Timings from before any choice may
    be observed, too."""

    def set_strategies(self, arms: Sequence[Strategy]) -> None:
        """What may be chosen from now on; what is known of other strategies is kept."""
        ...

    def choose(self, batch: int, context: int, random: float) -> Choice:
        """`context`: tokens of all running rows together; `random`: uniform in [0, 1)."""
        ...

    def observe(
        self,
        strategy: Strategy,
        batch: int,
        context: int,
        seconds: float,
        drafting: float,
        reached: Sequence[int],
        accepted: Sequence[int],
        width: int | None = None,
    ) -> None:
        """`seconds` of the whole round; `drafting`: those before the policy's own pass.

        `reached[j]`: rows whose first j drafts were all accepted; `accepted[j]`: those of them that
        accepted the next one, too. A row for which nothing was proposed counts as one that refused
        it. Both are empty without drafts. `width`: how many drafts the pass was over, if that was
        less than the strategy allows.
        """
        ...

    def observe_probe(
        self, strategy: Strategy, batch: int, reached: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """What it would have come to while another way decoded: counts as `observe` has them."""
        ...

    def handle_drafter_swap(self) -> None: ...

    def handle_weight_swap(self) -> None: ...
