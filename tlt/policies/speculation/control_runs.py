"""Decode some steps in a row without speculation now and then, as control runs.

A control run begins with a known probability, the same after every speculative decode step, so that
no step is more likely to be sampled than another. It lasts a fixed number of steps, even if the
batch size changes meanwhile; otherwise a draining batch would make plain decoding appear slow.
"""

import math
from collections.abc import Sequence

from tlt.base.strategies import Off, Strategy
from tlt.policies.speculation.strategy_policy import Choice, RunObservation, StrategyPolicy

# short, because more runs make the interval narrower, and the drafter has less to catch up with
RUN_STEPS = 4


class ControlRunPolicy:
    """Wrap a policy, and take a share of the steps in the long run."""

    def __init__(self, policy: StrategyPolicy, share: float) -> None:
        if not 0.0 < share < 0.5:
            raise ValueError("a share of the steps lies above 0 and below a half")
        self._policy = policy
        # probability of a control run after a speculative step
        self._rate = min(0.99, share / (1.0 - share) / RUN_STEPS)
        self._in_run = False
        # speculative steps until the next control run
        self._steps_left: int | None = None

    def set_strategies(self, strategies: Sequence[Strategy]) -> None:
        self._policy.set_strategies(strategies)

    def choose(self, batch: int, context: int, random: float) -> Choice:
        if self._steps_left is None:
            self._steps_left = self._draw_steps(random)
        self._in_run = self._steps_left <= 0
        if self._in_run:
            self._steps_left = self._draw_steps(random)
            return Choice(Off(), 0.0, "control", RUN_STEPS)
        choice = self._policy.choose(batch, context, random)
        return choice._replace(steps=min(choice.steps, self._steps_left))

    def observe(self, run: RunObservation) -> None:
        self._policy.observe(run)
        if not self._in_run and self._steps_left is not None:
            self._steps_left -= run.steps

    def handle_drafter_swap(self) -> None:
        self._policy.handle_drafter_swap()

    def handle_weight_swap(self) -> None:
        self._policy.handle_weight_swap()

    def _draw_steps(self, random: float) -> int:
        """Draw from a geometric distribution, at least one step."""
        return 1 + math.floor(math.log1p(-random) / math.log1p(-self._rate))
