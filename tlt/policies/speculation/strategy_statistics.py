"""Statistics of every strategy: the cost of its steps, and how many drafts they accept.

Costs and acceptance are learnt separately and shared by strategies, so that one step improves the
predictions for all strategies, also at batch sizes that were never observed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median
from typing import assert_never

from tlt.policies.speculation.acceptance_by_batch_size import (
    AcceptanceByBatchSize,
    PooledAcceptance,
)
from tlt.policies.speculation.cost_model import (
    BatchSizeCorrection,
    PassCost,
    ProposalCost,
    pass_seconds,
)
from tlt.policies.speculation.strategy_policy import StepObservation
from tlt.strategies import Draft, Ngram, Off, Strategy

# the weight of observed acceptance is halved in about a thousand steps
_DISCOUNT_EVERY = 64
_DISCOUNT = 0.96
# rows that observations before a swap count for
_OLD_DRAFTER = 4.0
_OLD_WEIGHTS = 32.0
# first guesses: the cost of a draft as a share of a plain step, and the acceptance at depth 1
_DRAFTER_STEP = 0.06
_LOOKUP_STEP = 0.005
_FIRST_ACCEPTANCE = 0.6
_FIRST_ACCEPTANCE_NGRAM = 0.4
# rows that n-grams' acceptance remembers; it changes with every sibling that ends
_MEMORY_NGRAM = 100.0


@dataclass(eq=False)
class _Proposer:
    """A source of drafts: what one draft costs and how many are accepted."""

    cost: ProposalCost
    acceptance: PooledAcceptance | AcceptanceByBatchSize


@dataclass(eq=False)
class Arm:
    """One strategy, the proposer behind it, and corrections of both costs that are its own."""

    strategy: Strategy
    drafts: int
    proposer: _Proposer | None
    pass_correction: BatchSizeCorrection
    proposal_correction: BatchSizeCorrection = field(default_factory=BatchSizeCorrection)

    def tokens(self, batch: int) -> float:
        """Return the expected tokens per step and row."""
        if self.proposer is None:
            return 1.0
        return 1.0 + self.proposer.acceptance.expected_accepts(batch, self.drafts)[self.drafts]


@dataclass(eq=False)
class StepSequence:
    """Consecutive steps of one arm at one batch size."""

    arm: Arm
    batch: int
    context: int
    pass_seconds: list[float] = field(default_factory=list[float])
    # seconds of the passes of steps that verified as many drafts as the arm allows
    full_pass_seconds: list[float] = field(default_factory=list[float])
    proposal_seconds: list[float] = field(default_factory=list[float])
    reached: Sequence[int] = ()
    accepted: Sequence[int] = ()

    def add(self, step: StepObservation) -> None:
        seconds = step.seconds - step.proposal_seconds
        self.pass_seconds.append(seconds)
        if step.width is None or step.width == self.arm.drafts:
            self.full_pass_seconds.append(seconds)
        self.proposal_seconds.append(step.proposal_seconds)
        if step.reached:
            self.reached = _add(self.reached, step.reached)
            self.accepted = _add(self.accepted, step.accepted)


class StrategyStatistics:
    def __init__(self) -> None:
        self._passes = PassCost()
        drafter = ProposalCost(_DRAFTER_STEP)
        noisy, best_guess = PooledAcceptance(_FIRST_ACCEPTANCE), PooledAcceptance(_FIRST_ACCEPTANCE)
        noisy.link(best_guess)
        self._ngram = _Proposer(
            ProposalCost(_LOOKUP_STEP),
            AcceptanceByBatchSize(_FIRST_ACCEPTANCE_NGRAM, _MEMORY_NGRAM),
        )
        self._noisy = _Proposer(drafter, noisy)
        self._best_guess = _Proposer(drafter, best_guess)
        self._arms: dict[Strategy, Arm] = {}
        self._last_cost: ProposalCost | None = None
        self._steps_to_discount = _DISCOUNT_EVERY

    def arm(self, strategy: Strategy) -> Arm:
        arm = self._arms.get(strategy)
        if arm is None:
            arm = self._arms[strategy] = self._new_arm(strategy)
        return arm

    def predict_speeds(self, arms: Sequence[Arm], batch: int, context: int) -> list[float]:
        """Return the predicted tokens per second of each arm."""
        point = self._passes.at(batch, context)
        per_draft: dict[ProposalCost, float] = {}
        speeds: list[float] = []
        for arm in arms:
            seconds = pass_seconds(point, arm.drafts, arm.pass_correction)
            if arm.proposer is not None:
                cost = arm.proposer.cost
                if cost not in per_draft:
                    per_draft[cost] = cost.at(point)
                own = math.exp(arm.proposal_correction.log_factor(point.knot, point.upper))
                seconds += arm.drafts * per_draft[cost] * own
            speeds.append(batch * arm.tokens(batch) / seconds)
        return speeds

    def uncertainty(self, arm: Arm, batch: int, context: int) -> float:
        """Return the standard deviation of the logarithm of an arm's speed, against `off`."""
        point = self._passes.at(batch, context)
        variance = self._passes.uncertainty(point, arm.drafts, arm.pass_correction)
        if arm.proposer is not None:
            variance += arm.proposer.acceptance.uncertainty(batch, arm.drafts) ** 2
        return math.sqrt(variance)

    def observe(self, steps: StepSequence) -> None:
        self._observe_costs(steps)
        proposer = steps.arm.proposer
        if proposer is not None:
            proposer.acceptance.observe(steps.batch, steps.reached, steps.accepted)
        self._last_cost = None if proposer is None else proposer.cost
        self._steps_to_discount -= len(steps.pass_seconds)
        if self._steps_to_discount <= 0:
            self._steps_to_discount = _DISCOUNT_EVERY
            for proposer in (self._ngram, self._noisy, self._best_guess):
                proposer.acceptance.discount(_DISCOUNT)

    def discount_old_drafter(self) -> None:
        for proposer in (self._noisy, self._best_guess):
            proposer.acceptance.discount(1.0, most=_OLD_DRAFTER)

    def discount_old_weights(self) -> None:
        for proposer in (self._ngram, self._noisy, self._best_guess):
            proposer.acceptance.discount(1.0, most=_OLD_WEIGHTS)

    def _new_arm(self, strategy: Strategy) -> Arm:
        match strategy:
            case Off():
                return Arm(strategy, 0, None, BatchSizeCorrection())
            case Ngram(tokens=tokens):
                return Arm(strategy, tokens, self._ngram, BatchSizeCorrection())
            case Draft(depth=depth, noise=noise):
                # the pass costs the same however its drafts were proposed
                twin = self._arms.get(Draft(depth=depth, noise=not noise))
                correction = BatchSizeCorrection() if twin is None else twin.pass_correction
                return Arm(strategy, depth, self._noisy if noise else self._best_guess, correction)
            case _:
                assert_never(strategy)

    def _observe_costs(self, steps: StepSequence) -> None:
        arm, batch, context = steps.arm, steps.batch, steps.context
        if full := steps.full_pass_seconds:
            point = self._passes.at(batch, context)
            self._passes.observe(point, arm.drafts, arm.pass_correction, median(full), len(full))
        if arm.proposer is None:
            return
        point, cost, own = (
            self._passes.at(batch, context),
            arm.proposer.cost,
            arm.proposal_correction,
        )
        seconds = steps.proposal_seconds
        if self._last_cost is not cost:
            # a proposer's first step after steps of other strategies includes catching up with them
            first, seconds = seconds[0], seconds[1:]
            if not seconds and first < cost.seconds(point, arm.drafts, own):
                seconds = [first]
        if seconds:
            cost.observe(point, arm.drafts, own, median(seconds), len(seconds))


def _add(left: Sequence[int], right: Sequence[int]) -> Sequence[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)] if left else right
