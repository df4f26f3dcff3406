"""The baseline strategy: an epsilon-greedy bandit over the measured tokens per second.

Each bucket of batch sizes keeps a window of recent decode steps for each strategy and compares
their medians. Nothing is shared between buckets, so each strategy is first tried in each of them.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

from tlt.policies.speculation.strategy_policy import Choice, RunObservation, bucket_of
from tlt.strategies import Strategy


class BucketBandit:
    def __init__(self, epsilon: float = 0.05, window: int = 16) -> None:
        self._epsilon = epsilon
        self._window = window
        self._offered: list[Strategy] = []
        self._seen: dict[tuple[int, Strategy], deque[float]] = {}

    def set_strategies(self, strategies: Sequence[Strategy]) -> None:
        if not strategies:
            raise ValueError("a policy needs at least one strategy to choose")
        self._offered = list(strategies)

    def choose(self, batch: int, context: int, random: float) -> Choice:
        arms = self._offered
        if len(arms) == 1:
            return Choice(arms[0], self._speed(batch, arms[0]) or 0.0, "only")
        speeds = [self._speed(batch, arm) for arm in arms]
        if None in speeds:
            return Choice(arms[speeds.index(None)], 0.0, "explore")
        known = [speed for speed in speeds if speed is not None]
        best = known.index(max(known))
        if random < self._epsilon:
            index = int(random / self._epsilon * len(arms))
            return Choice(arms[index], known[index], "best" if index == best else "explore")
        return Choice(arms[best], known[best], "best")

    def observe(self, run: RunObservation) -> None:
        if run.seconds > 0.0:
            key = bucket_of(run.batch), run.strategy
            window = self._seen.setdefault(key, deque(maxlen=self._window))
            tokens = run.steps + sum(run.accepted) / run.batch
            window.append(tokens / run.seconds)

    def handle_drafter_swap(self) -> None:
        """Do nothing: old measurements leave the window."""

    def handle_weight_swap(self) -> None:
        """Do nothing: old measurements leave the window."""

    def _speed(self, batch: int, arm: Strategy) -> float | None:
        window = self._seen.get((bucket_of(batch), arm))
        return None if window is None else batch * median(window)
