"""The strategy with the most predicted tokens per second is chosen.

A prediction is made of two things that are learnt apart: what a round costs at this batch and
context, and how many drafts are accepted. So one round teaches something about all arms, and a
batch size that was never seen has a prediction. What trying others costs stays within an
allowance, and an arm that could hardly become the best isn't tried.
"""

import math
from collections.abc import Sequence
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
from tlt.policies.speculation.exploration_budget import ExplorationBudget
from tlt.policies.speculation.strategy_policy import Choice, ChoiceReason
from tlt.strategies import Draft, Ngram, Off, Strategy

# rounds for which a decision holds while the batch stays, so that deciding costs next to nothing
_HELD_ROUNDS = 4
# rows that a trial should see
_TRIAL_ROWS = 8
# of a decision, where the allowance suffices
_EXPLORE_CHANCE = 0.25
# rounds over which a better arm pays back what finding it cost
_HORIZON = 200.0
# a round that takes so many times as long as expected was interrupted
_INTERRUPTED = 4.0
# old knowledge of acceptance fades to a half in some thousand rounds
_FADE_EVERY = 64
_FADE = 0.96
# rows that what was seen before a swap counts for
_OLD_DRAFTER = 4.0
_OLD_WEIGHTS = 32.0
# before any was seen: a drafted or looked-up token, as a share of a plain step
_DRAFTER_STEP = 0.06
_LOOKUP_STEP = 0.005
_FIRST_ACCEPTANCE = 0.6
_FIRST_ACCEPTANCE_NGRAM = 0.4
# rows that n-grams are known from: how well they guess changes with every sibling that ends
_MEMORY_NGRAM = 100.0


class _Proposer:
    """One way of drafting: what a token of it costs and how many are accepted."""

    def __init__(
        self, cost: ProposalCost, acceptance: PooledAcceptance | AcceptanceByBatchSize
    ) -> None:
        self.cost = cost
        self.acceptance = acceptance


class _Arm:
    def __init__(
        self,
        strategy: Strategy,
        drafted: int,
        proposer: _Proposer | None,
        passing: BatchSizeCorrection,
    ) -> None:
        self.strategy = strategy
        self.drafted = drafted
        self.proposer = proposer
        # what is particular to it in the cost of the pass and of the drafting
        self.passing = passing
        self.drafting = BatchSizeCorrection()

    def tokens(self, batch: int) -> float:
        """Of a round and row, as far as is known."""
        if self.proposer is None:
            return 1.0
        return 1.0 + self.proposer.acceptance.gains(batch, self.drafted)[self.drafted]


class _Stretch:
    """Rounds in a row of one arm at one batch size."""

    def __init__(self, arm: _Arm, batch: int, context: int) -> None:
        self.arm = arm
        self.batch = batch
        self.context = context
        self.passing: list[float] = []
        # of rounds in which as much was verified as the arm allows
        self.whole: list[float] = []
        self.drafting: list[float] = []
        self.reached: Sequence[int] = ()
        self.accepted: Sequence[int] = ()

    def add(
        self,
        seconds: float,
        drafting: float,
        reached: Sequence[int],
        accepted: Sequence[int],
        width: int | None,
    ) -> None:
        self.passing.append(seconds - drafting)
        if width is None or width == self.arm.drafted:
            self.whole.append(seconds - drafting)
        self.drafting.append(drafting)
        if reached:
            self.reached = _added(self.reached, reached)
            self.accepted = _added(self.accepted, accepted)


class _Decision:
    def __init__(
        self, arm: _Arm, batch: int, speed: float, best_speed: float, why: ChoiceReason
    ) -> None:
        self.choice = Choice(arm.strategy, speed, why)
        self.batch = batch
        self.best_speed = best_speed
        self.round_seconds = batch * arm.tokens(batch) / speed
        self.rounds_left = _trial_rounds(batch) if why == "explore" else _HELD_ROUNDS


class AdaptivePolicy:
    def __init__(self) -> None:
        drafter = ProposalCost(_DRAFTER_STEP)
        self._passes = PassCost()
        ngrams = AcceptanceByBatchSize(_FIRST_ACCEPTANCE_NGRAM, _MEMORY_NGRAM)
        noisy, best_guess = PooledAcceptance(_FIRST_ACCEPTANCE), PooledAcceptance(_FIRST_ACCEPTANCE)
        noisy.take_after(best_guess)
        self._ngram = _Proposer(ProposalCost(_LOOKUP_STEP), ngrams)
        self._noisy = _Proposer(drafter, noisy)
        self._best_guess = _Proposer(drafter, best_guess)
        self._arms: dict[Strategy, _Arm] = {}
        self._offered: list[_Arm] = []
        self._decision: _Decision | None = None
        self._stretch: _Stretch | None = None
        self._last_cost: ProposalCost | None = None
        self._allowance = ExplorationBudget()
        self._rounds_to_fade = _FADE_EVERY

    def set_strategies(self, arms: Sequence[Strategy]) -> None:
        if not arms:
            raise ValueError("a policy needs at least one strategy to choose from")
        self._learn()
        self._offered = [self._arm(strategy) for strategy in arms]
        self._decision = None

    def choose(self, batch: int, context: int, random: float) -> Choice:
        decision = self._decision
        if decision is None or decision.batch != batch or decision.rounds_left == 0:
            self._learn()
            decision = self._decision = self._decide(batch, context, random)
        decision.rounds_left -= 1
        return decision.choice

    def observe(
        self,
        strategy: Strategy,
        batch: int,
        context: int,
        seconds: float,
        drafting: float,
        reached: Sequence[int],
        accepted: Sequence[int],
        width: int | None = None,
    ) -> None:
        stretch = self._stretch
        if (
            stretch is None
            or stretch.arm.strategy != strategy
            or stretch.batch != batch
            or len(stretch.passing) == _HELD_ROUNDS
        ):
            self._learn()
            stretch = self._stretch = _Stretch(self._arm(strategy), batch, context)
        stretch.add(seconds, drafting, reached, accepted, width)

    def observe_probe(
        self, strategy: Strategy, batch: int, reached: Sequence[int], accepted: Sequence[int]
    ) -> None:
        proposer = self._arm(strategy).proposer
        if proposer is not None:
            proposer.acceptance.observe(batch, reached, accepted)

    def handle_drafter_swap(self) -> None:
        self._learn()
        for proposer in (self._noisy, self._best_guess):
            proposer.acceptance.fade(1.0, most=_OLD_DRAFTER)
        self._allowance.grant()
        self._decision = None

    def handle_weight_swap(self) -> None:
        self._learn()
        for proposer in (self._ngram, self._noisy, self._best_guess):
            proposer.acceptance.fade(1.0, most=_OLD_WEIGHTS)

    def predicted(self, batch: int, context: int) -> dict[Strategy, float]:
        """Tokens per second of every strategy on offer."""
        self._learn()
        speeds = self._speeds(batch, context)
        return {arm.strategy: speed for arm, speed in zip(self._offered, speeds, strict=True)}

    def _arm(self, strategy: Strategy) -> _Arm:
        arm = self._arms.get(strategy)
        if arm is None:
            arm = self._arms[strategy] = self._new_arm(strategy)
        return arm

    def _new_arm(self, strategy: Strategy) -> _Arm:
        match strategy:
            case Off():
                return _Arm(strategy, 0, None, BatchSizeCorrection())
            case Ngram(tokens=tokens):
                return _Arm(strategy, tokens, self._ngram, BatchSizeCorrection())
            case Draft(depth=depth, noise=noise):
                # how a draft came about makes no difference to the pass over it
                twin = self._arms.get(Draft(depth=depth, noise=not noise))
                passing = BatchSizeCorrection() if twin is None else twin.passing
                return _Arm(strategy, depth, self._noisy if noise else self._best_guess, passing)
            case _:
                assert_never(strategy)

    # --- deciding -------------------------------------------------------------------------------

    def _decide(self, batch: int, context: int, random: float) -> _Decision:
        speeds = self._speeds(batch, context)
        most = max(speeds)
        best = speeds.index(most)
        if len(speeds) == 1:
            return _Decision(self._offered[0], batch, most, most, "only")
        if random < _EXPLORE_CHANCE and self._allowance.seconds > 0.0:
            tried = self._worth_trying(batch, context, speeds, best)
            if tried is not None:
                return _Decision(self._offered[tried], batch, speeds[tried], most, "explore")
        return _Decision(self._offered[best], batch, most, most, "best")

    def _speeds(self, batch: int, context: int) -> list[float]:
        place = self._passes.at(batch, context)
        knot, upper = place.knot, place.upper
        each: dict[ProposalCost, float] = {}
        speeds: list[float] = []
        for arm in self._offered:
            seconds = pass_seconds(place, arm.drafted, arm.passing)
            if arm.proposer is not None:
                cost = arm.proposer.cost
                if cost not in each:
                    each[cost] = cost.at(place)
                own = math.exp(arm.drafting.at(knot, upper))
                seconds += arm.drafted * each[cost] * own
            speeds.append(batch * arm.tokens(batch) / seconds)
        return speeds

    def _worth_trying(self, batch: int, context: int, speeds: list[float], best: int) -> int | None:
        """The arm whose chance to be better is worth the most for what trying it costs."""
        found, most = None, 0.0
        for index, (arm, speed) in enumerate(zip(self._offered, speeds, strict=True)):
            rounds = _trial_rounds(batch) * (1.0 - speed / speeds[best])
            seconds = rounds * batch * arm.tokens(batch) / speed
            if index == best or seconds > self._allowance.seconds:
                continue
            behind = math.log(speeds[best] / speed)
            worth = _HORIZON * _expected_gain(behind, self._doubt(arm, batch, context))
            if worth - rounds > most:
                found, most = index, worth - rounds
        return found

    def _doubt(self, arm: _Arm, batch: int, context: int) -> float:
        """The standard deviation of the logarithm of its speed against that of a plain step."""
        variance = self._passes.doubt(batch, context, arm.drafted, arm.passing)
        if arm.proposer is not None:
            variance += arm.proposer.acceptance.doubt(batch, arm.drafted) ** 2
        return math.sqrt(variance)

    # --- learning -------------------------------------------------------------------------------

    def _learn(self) -> None:
        """From the rounds since the last decision."""
        stretch, decision = self._stretch, self._decision
        self._stretch = None
        if stretch is None:
            return
        self._learn_costs(stretch)
        if stretch.arm.proposer is not None:
            seen = (stretch.batch, stretch.reached, stretch.accepted)
            stretch.arm.proposer.acceptance.observe(*seen)
        self._last_cost = None if stretch.arm.proposer is None else stretch.arm.proposer.cost
        if decision is not None and decision.choice.strategy == stretch.arm.strategy:
            self._account(stretch, decision)
        self._rounds_to_fade -= len(stretch.passing)
        if self._rounds_to_fade <= 0:
            self._rounds_to_fade = _FADE_EVERY
            for proposer in (self._ngram, self._noisy, self._best_guess):
                proposer.acceptance.fade(_FADE)

    def _learn_costs(self, stretch: _Stretch) -> None:
        arm, batch, context = stretch.arm, stretch.batch, stretch.context
        if stretch.whole:
            passing, rounds = median(stretch.whole), len(stretch.whole)
            self._passes.observe(batch, context, arm.drafted, arm.passing, passing, rounds)
        if arm.proposer is None:
            return
        place, cost = self._passes.at(batch, context), arm.proposer.cost
        drafting = stretch.drafting
        if self._last_cost is not cost:
            # after others decoded, the first round has to catch up with what they did
            first, drafting = drafting[0], drafting[1:]
            if not drafting and first < cost.seconds(place, arm.drafted, arm.drafting):
                drafting = [first]
        if drafting:
            typical = median(drafting)
            cost.observe(place, arm.drafted, arm.drafting, typical, len(drafting))

    def _account(self, stretch: _Stretch, decision: _Decision) -> None:
        """Time earns an allowance; trying an arm spends what was lost against the best one."""
        longest = _INTERRUPTED * decision.round_seconds
        pairs = zip(stretch.passing, stretch.drafting, strict=True)
        seconds = sum(min(passing + drafting, longest) for passing, drafting in pairs)
        if not 0.0 < seconds < math.inf:
            return
        if decision.choice.why == "explore":
            tokens = len(stretch.passing) * stretch.batch + sum(stretch.accepted)
            lost = seconds - tokens / decision.best_speed
            self._allowance.spend(lost, decision.round_seconds)
        self._allowance.earn(seconds, decision.round_seconds)


def _trial_rounds(batch: int) -> int:
    return max(1, min(_HELD_ROUNDS, _TRIAL_ROWS // batch))


def _added(left: Sequence[int], right: Sequence[int]) -> Sequence[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)] if left else right


def _expected_gain(behind: float, doubt: float) -> float:
    """Of a normal variable that lies so far below zero on average: the mean of what exceeds it."""
    if doubt <= 0.0:
        return 0.0
    z = behind / doubt
    density = math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return doubt * (density - z * 0.5 * math.erfc(z / math.sqrt(2.0)))
