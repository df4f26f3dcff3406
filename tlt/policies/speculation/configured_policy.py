"""Make the strategy policy of a job's spec; a fixed one chooses the same whatever it observes."""

from collections.abc import Sequence

from tlt.base.strategies import Off, Strategy
from tlt.policies.speculation.adaptive_strategy import AdaptivePolicy
from tlt.policies.speculation.control_runs import ControlRunPolicy
from tlt.policies.speculation.strategy_policy import Choice, RunObservation, StrategyPolicy

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


class ScriptedPolicy(FixedPolicy):
    """Choose strategies in turn, each for some steps, without those that aren't available."""

    def __init__(self, script: Sequence[tuple[Strategy, int]]) -> None:
        super().__init__(Off())
        self._script = self._available = script
        self._chosen = 0

    def set_strategies(self, strategies: Sequence[Strategy]) -> None:
        self._available = [run for run in self._script if run[0] in strategies] or [(Off(), _STEPS)]
        self._chosen = 0

    def choose(self, batch: int, context: int, random: float) -> Choice:
        strategy, steps = self._available[self._chosen % len(self._available)]
        self._chosen += 1
        return Choice(strategy, 0.0, "only", steps)


def configured_policy(fixed: Strategy | None, control_share: float) -> StrategyPolicy:
    """Return a policy that always chooses `fixed`, or adapts, with a share of control runs."""
    policy = AdaptivePolicy() if fixed is None else FixedPolicy(fixed)
    return ControlRunPolicy(policy, control_share) if control_share > 0 else policy
