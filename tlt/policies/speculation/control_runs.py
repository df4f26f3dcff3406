"""Decode some steps in a row without speculation now and then, as control runs.

A control run begins with a known probability, the same after every speculative decode step, so that
no step is more likely to be sampled than another. It lasts a fixed number of steps, even if the
batch size changes meanwhile; otherwise a draining batch would make plain decoding appear slow.
"""

from collections.abc import Sequence

from tlt.policies.speculation.strategy_policy import Choice, RunObservation, StrategyPolicy
from tlt.strategies import Off, Strategy

RUN_STEPS = 16


class ControlRunPolicy:
    """Wrap a policy, and take a share of the steps in the long run."""

    def __init__(self, policy: StrategyPolicy, share: float) -> None:
        if not 0.0 < share < 0.5:
            raise ValueError("a share of the steps lies above 0 and below a half")
        self._policy = policy
        # expected control runs per speculative step
        self._rate = share / (1.0 - share) / RUN_STEPS
        self._in_run = False
        # speculative steps since the last draw
        self._steps = 0

    def set_strategies(self, strategies: Sequence[Strategy]) -> None:
        self._policy.set_strategies(strategies)

    def choose(self, batch: int, context: int, random: float) -> Choice:
        chance = min(1.0, self._rate * self._steps)
        self._steps = 0
        self._in_run = random < chance
        if self._in_run:
            return Choice(Off(), 0.0, "control", RUN_STEPS)
        # the remainder of the number, rescaled, is random as well
        return self._policy.choose(batch, context, (random - chance) / (1.0 - chance))

    def observe(self, run: RunObservation) -> None:
        self._policy.observe(run)
        if not self._in_run:
            self._steps += run.steps

    def handle_drafter_swap(self) -> None:
        self._policy.handle_drafter_swap()

    def handle_weight_swap(self) -> None:
        self._policy.handle_weight_swap()
