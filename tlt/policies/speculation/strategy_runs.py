"""Hold each choice of a policy for a run of decode steps, and add the steps up.

A run ends early in another bucket of batch sizes, because other strategies pay there. Where results
come later than the next choice, a run that has ended waits for those of its last steps.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from tlt.base.strategies import Off, Strategy, max_drafts
from tlt.policies.speculation.strategy_policy import (
    Choice,
    RunObservation,
    StepObservation,
    StrategyPolicy,
    bucket_of,
)

# a batch size may change to and fro
_LEAST_STEPS = 4


class StrategyRuns:
    def __init__(
        self,
        policy: StrategyPolicy,
        draw: Callable[[], float],
        count_awaited: Callable[[], int] = lambda: 0,
    ) -> None:
        """Let `draw` return random numbers in [0, 1).

        `count_awaited` returns how many steps that were chosen will still be observed.
        """
        self._policy = policy
        self._draw = draw
        self._choice = Choice(Off(), 0.0, "only")
        self._steps = self._steps_left = 0
        # batch sizes that the choice holds for
        self._least = self._most = 0
        self._run: _Run | None = None
        self._count_awaited = count_awaited
        # runs that have ended before all of their steps were observed
        self._unfinished: deque[_Unfinished] = deque()

    def set_strategies(self, strategies: Sequence[Strategy]) -> None:
        self.end_run()
        self._policy.set_strategies(strategies)

    def choose(self, batch: int, context: int) -> Choice:
        elsewhere = self._steps >= _LEAST_STEPS and not self._least <= batch <= self._most
        if self._steps_left == 0 or (elsewhere and self._choice.why != "control"):
            self.end_run()
            self._choice = self._policy.choose(batch, context, self._draw())
            self._steps, self._steps_left = 0, self._choice.steps
            self._most = bucket_of(batch)
            self._least = self._most // 2 + 1
        self._steps += 1
        self._steps_left -= 1
        return self._choice

    def observe(self, step: StepObservation) -> None:
        if self._unfinished:
            self._observe_late(step)
            return
        if self._run is None:
            self._run = _Run(step.strategy)
        self._run.add(step)

    def _observe_late(self, step: StepObservation) -> None:
        first = self._unfinished[0]
        first.run.add(step)
        first.awaited -= 1
        if first.awaited == 0:
            self._unfinished.popleft()
            if not first.discarded:
                self._policy.observe(first.run.observation())

    def observe_plain(self, batch: int, context: int, seconds: float) -> None:
        """Count a step without drafts, which has nothing else to teach."""
        if self._run is None:
            self._run = _Run(self._choice.strategy)
        self._run.add_plain(batch, context, seconds)

    def end_run(self) -> None:
        self._steps_left = 0
        run, self._run = self._run, None
        awaited = self._count_awaited() - sum(each.awaited for each in self._unfinished)
        if awaited > 0:
            run = run or _Run(self._choice.strategy)
            self._unfinished.append(_Unfinished(run=run, awaited=awaited))
        elif run is not None:
            self._policy.observe(run.observation())

    def handle_drafter_swap(self) -> None:
        self._discard_unfinished()
        self._policy.handle_drafter_swap()

    def handle_weight_swap(self) -> None:
        self._discard_unfinished()
        self._policy.handle_weight_swap()

    def _discard_unfinished(self) -> None:
        """End the run; what is still to come says nothing about what decodes next."""
        self.end_run()
        for each in self._unfinished:
            each.discarded = True


@dataclass(kw_only=True)
class _Unfinished:
    run: "_Run"
    # steps to be observed
    awaited: int
    discarded: bool = False


class _Run:
    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._drafts = max_drafts(strategy)
        self._steps = self._rows = self._context = 0
        self._seconds = 0.0
        self._full_passes, self._pass_seconds = 0, 0.0
        self._proposals, self._proposal_seconds = 0, 0.0
        self._reached: Sequence[int] = ()
        self._accepted: Sequence[int] = ()

    def add_plain(self, batch: int, context: int, seconds: float) -> None:
        self._steps += 1
        self._rows += batch
        self._context += context
        self._seconds += seconds

    def add(self, step: StepObservation) -> None:
        self.add_plain(step.batch, step.context, step.seconds)
        if self._drafts == 0:
            return
        if self._steps > 1:
            self._proposals += 1
            self._proposal_seconds += step.proposal_seconds
        if step.width is None or step.width == self._drafts:
            self._full_passes += 1
            self._pass_seconds += step.seconds - step.proposal_seconds
        self._reached = _sum(self._reached, step.reached)
        self._accepted = _sum(self._accepted, step.accepted)

    def observation(self) -> RunObservation:
        steps, full, seconds = self._steps, self._full_passes, self._pass_seconds
        if self._drafts == 0:
            full, seconds = steps, self._seconds
        return RunObservation(
            self._strategy,
            steps,
            self._rows / steps,
            self._context / steps,
            full,
            seconds / max(1, full),
            self._proposals,
            self._proposal_seconds / max(1, self._proposals),
            self._seconds,
            self._reached,
            self._accepted,
        )


def _sum(left: Sequence[int], right: Sequence[int]) -> Sequence[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)] if left else right
