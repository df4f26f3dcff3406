"""A policy that always chooses the same strategy where it is available, and `off` elsewhere."""

from collections.abc import Sequence

from tlt.policies.speculation.strategy_policy import Choice, RunObservation
from tlt.strategies import Off, Strategy

_STEPS = 16


class FixedPolicy:
    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._choice: Strategy = Off()

    def set_strategies(self, strategies: Sequence[Strategy]) -> None:
        self._choice = self._strategy if self._strategy in strategies else Off()

    def choose(self, batch: int, context: int, random: float) -> Choice:
        return Choice(self._choice, 0.0, "only", _STEPS)

    def observe(self, run: RunObservation) -> None:
        pass

    def handle_drafter_swap(self) -> None:
        pass

    def handle_weight_swap(self) -> None:
        pass
