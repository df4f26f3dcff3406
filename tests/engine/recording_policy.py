"""Record what an engine reports to its strategy policy."""

from tlt.base.strategies import Strategy
from tlt.policies.speculation.adaptive_strategy import AdaptivePolicy
from tlt.policies.speculation.strategy_policy import Choice, RunObservation


class RecordingPolicy(AdaptivePolicy):
    """Always make the same choice for one step, and record the observations."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self.strategy = strategy
        self.observed: list[tuple[list[int], list[int]]] = []

    def choose(self, batch: int, context: int, random: float) -> Choice:
        return Choice(self.strategy, 1.0, "only")

    def observe(self, run: RunObservation) -> None:
        self.observed.append((list(run.reached), list(run.accepted)))
