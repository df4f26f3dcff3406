"""What each way of decoding came to, until somebody asks."""

from dataclasses import dataclass

from tlt.messages import StrategyTally
from tlt.policies.strategy import Choice
from tlt.strategies import Strategy


@dataclass
class _Sums:
    rounds: int = 0
    tried: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    expected: float = 0.0


class Tallies:
    def __init__(self) -> None:
        self._sums: dict[Strategy, _Sums] = {}

    def add(self, choice: Choice, rows: int, tokens: int, seconds: float) -> None:
        sums = self._sums.setdefault(choice.strategy, _Sums())
        sums.rounds += 1
        sums.tried += choice.why == "explore"
        sums.rows += rows
        sums.tokens += tokens
        sums.seconds += seconds
        sums.expected += choice.predicted * seconds

    def taken(self) -> tuple[StrategyTally, ...]:
        """By strategy; from now on they are counted anew."""
        sums, self._sums = self._sums, {}
        return tuple(
            StrategyTally(
                strategy=strategy,
                rounds=of.rounds,
                tried=of.tried,
                rows=of.rows,
                tokens=of.tokens,
                seconds=of.seconds,
                expected=of.expected,
            )
            for strategy, of in sums.items()
        )
