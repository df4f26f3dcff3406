"""Choose the strategy with the most predicted tokens per second, and explore within a budget.

A strategy that could hardly become the best is not explored.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tlt.policies.speculation.exploration_budget import ExplorationBudget
from tlt.policies.speculation.strategy_policy import Choice, StepObservation
from tlt.policies.speculation.strategy_statistics import Arm, StepSequence, StrategyStatistics
from tlt.strategies import Strategy

# steps for which a decision holds while the batch size stays, so that deciding costs little
_DECISION_STEPS = 4
# rows that a trial should see
_TRIAL_ROWS = 8
# share of the decisions that explore, where the budget suffices
_EXPLORE_CHANCE = 0.25
# steps over which a better strategy pays back the cost of exploring it
_HORIZON = 200.0
# a step that takes this many times the expected time was interrupted
_INTERRUPTED = 4.0


@dataclass(eq=False)
class _Decision:
    choice: Choice
    batch: int
    best_speed: float
    # predicted
    step_seconds: float
    steps_left: int


class AdaptivePolicy:
    def __init__(self) -> None:
        self._statistics = StrategyStatistics()
        self._budget = ExplorationBudget()
        self._arms: list[Arm] = []
        self._decision: _Decision | None = None
        # steps that the statistics have not observed yet
        self._steps: StepSequence | None = None

    def set_strategies(self, strategies: Sequence[Strategy]) -> None:
        if not strategies:
            raise ValueError("a policy needs at least one strategy to choose from")
        self._learn()
        self._arms = [self._statistics.arm(strategy) for strategy in strategies]
        self._decision = None

    def choose(self, batch: int, context: int, random: float) -> Choice:
        decision = self._decision
        if decision is None or decision.batch != batch or decision.steps_left == 0:
            self._learn()
            decision = self._decision = self._decide(batch, context, random)
        decision.steps_left -= 1
        return decision.choice

    def observe(self, step: StepObservation) -> None:
        steps = self._steps
        if (
            steps is None
            or steps.arm.strategy != step.strategy
            or steps.batch != step.batch
            or len(steps.pass_seconds) == _DECISION_STEPS
        ):
            self._learn()
            arm = self._statistics.arm(step.strategy)
            steps = self._steps = StepSequence(arm, step.batch, step.context)
        steps.add(step)

    def observe_probe(
        self, strategy: Strategy, batch: int, reached: Sequence[int], accepted: Sequence[int]
    ) -> None:
        proposer = self._statistics.arm(strategy).proposer
        if proposer is not None:
            proposer.acceptance.observe(batch, reached, accepted)

    def handle_drafter_swap(self) -> None:
        self._learn()
        self._statistics.discount_old_drafter()
        self._budget.grant()
        self._decision = None

    def handle_weight_swap(self) -> None:
        self._learn()
        self._statistics.discount_old_weights()

    def predict_speeds(self, batch: int, context: int) -> dict[Strategy, float]:
        """Return the predicted tokens per second of every available strategy."""
        self._learn()
        speeds = self._statistics.predict_speeds(self._arms, batch, context)
        return {arm.strategy: speed for arm, speed in zip(self._arms, speeds, strict=True)}

    def _decide(self, batch: int, context: int, random: float) -> _Decision:
        speeds = self._statistics.predict_speeds(self._arms, batch, context)
        most = max(speeds)
        best = chosen = speeds.index(most)
        why, steps = "only" if len(speeds) == 1 else "best", _DECISION_STEPS
        if len(speeds) > 1 and random < _EXPLORE_CHANCE and self._budget.seconds > 0.0:
            trial = self._best_trial(batch, context, speeds, best)
            if trial is not None:
                chosen, why, steps = trial, "explore", _trial_steps(batch)
        arm, speed = self._arms[chosen], speeds[chosen]
        step_seconds = batch * arm.tokens(batch) / speed
        return _Decision(Choice(arm.strategy, speed, why), batch, most, step_seconds, steps)

    def _best_trial(self, batch: int, context: int, speeds: list[float], best: int) -> int | None:
        """Return the arm whose expected gain exceeds the cost of a trial by the most.

        Both are counted in steps of the best arm.
        """
        found, most = None, 0.0
        for index, (arm, speed) in enumerate(zip(self._arms, speeds, strict=True)):
            steps = _trial_steps(batch) * (1.0 - speed / speeds[best])
            seconds = steps * batch * arm.tokens(batch) / speed
            if index == best or seconds > self._budget.seconds:
                continue
            behind = math.log(speeds[best] / speed)
            uncertainty = self._statistics.uncertainty(arm, batch, context)
            worth = _HORIZON * _expected_gain(behind, uncertainty)
            if worth - steps > most:
                found, most = index, worth - steps
        return found

    def _learn(self) -> None:
        """Learn from the steps since the last decision."""
        steps, decision = self._steps, self._decision
        self._steps = None
        if steps is None:
            return
        self._statistics.observe(steps)
        if decision is not None and decision.choice.strategy == steps.arm.strategy:
            self._update_budget(steps, decision)

    def _update_budget(self, steps: StepSequence, decision: _Decision) -> None:
        """Earn a share of the time that passed; after a trial, spend its loss against the best."""
        longest = _INTERRUPTED * decision.step_seconds
        pairs = zip(steps.pass_seconds, steps.proposal_seconds, strict=True)
        seconds = sum(min(own + proposal, longest) for own, proposal in pairs)
        if not 0.0 < seconds < math.inf:
            return
        if decision.choice.why == "explore":
            tokens = len(steps.pass_seconds) * steps.batch + sum(steps.accepted)
            lost = seconds - tokens / decision.best_speed
            self._budget.spend(lost, decision.step_seconds)
        self._budget.earn(seconds, decision.step_seconds)


def _trial_steps(batch: int) -> int:
    return max(1, min(_DECISION_STEPS, _TRIAL_ROWS // batch))


def _expected_gain(behind: float, deviation: float) -> float:
    """Return the mean of the positive part of a normal variable with mean `-behind`."""
    if deviation <= 0.0:
        return 0.0
    z = behind / deviation
    density = math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return deviation * (density - z * 0.5 * math.erfc(z / math.sqrt(2.0)))
