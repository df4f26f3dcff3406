"""Choose the strategy with the most predicted tokens per second; lose little in finding it.

Costs and acceptance are learnt apart and shared by strategies, so that one run improves the
predictions for all. A strategy that may be better than it seems is tried within a budget. What is
lost against plain decoding, by trials or by wrong predictions, is paid from an account that grows
by a small share of the decoding time; while it is empty, decoding is plain.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tlt.base.strategies import Draft, Ngram, Off, Strategy, max_drafts
from tlt.policies.speculation.acceptance import Acceptance, AcceptancePrior
from tlt.policies.speculation.step_costs import PassCost, ProposalCost
from tlt.policies.speculation.strategy_policy import Choice, RunObservation, bucket_of

# share of the decoding time that trials may cost, and that may be lost against plain decoding
_TRIAL_SHARE, _LOSS_SHARE = 0.005, 0.01
# plain steps that both may cost at the beginning and after the first drafter, and may be saved up
_TRIALS_GRANTED, _TRIALS_SAVED = 1.0, 4.0
_LOSS_GRANTED, _LOSS_SAVED = 12.0, 24.0
# share of the decoding time since the last grant that both are granted for another drafter
_GRANTED_SHARE = 0.005
# least that a trial costs, in plain steps: single steps among others take longer than many in a row
_LEAST_TRIAL = 0.05
# steps that a new choice holds for, doubled each time it is confirmed, and the longest; plain steps
# teach nothing that would change the choice
_FIRST_STEPS, _MOST_STEPS, _MOST_PLAIN_STEPS = 4, 64, 256
# rows that a trial should see, its steps at most, those of one that is repeated, and steps over
# which it pays back
_TRIAL_ROWS, _TRIAL_STEPS, _MOST_TRIAL_STEPS = 8, 2, 4
_HORIZON = 200.0
# a run that takes this many times the expected time was interrupted; a first proposal, which
# catches up with what the proposer missed, takes a few times as long
_INTERRUPTED = 12.0
# most that a trial is charged for, in expected times: an interruption isn't its fault
_CHARGED = 2.0
# gain that drafts must promise: single plain steps among others take longer than many in a row
_LEAST_GAIN = 1.02
# runs whose results may be awaited
_MOST_UNSETTLED = 4
# first guess of what a look-up, or a draft, costs as a share of a plain step
_LOOKUP, _DRAFT = 0.01, 0.06
# n-grams' acceptance changes with every sibling that ends, so it is learnt by batch size
_NGRAM_PRIOR = AcceptancePrior(first=0.4, memory=64.0, half_life=64.0)
_DRAFTER_PRIOR = AcceptancePrior(first=0.6, memory=300.0, half_life=256.0)
# rows that observations count for: with another drafter, or other weights
_OLD_DRAFTER, _OLD_WEIGHTS = 4.0, 32.0

_Proposer = Literal["ngram", "noisy", "plain"]


class _Arm(NamedTuple):
    strategy: Strategy
    proposer: _Proposer | None
    drafts: int
    # proposals per step whose cost is a unit: a look-up is one, a chain has one per draft
    proposals: int


class _Prediction(NamedTuple):
    # tokens per second and row
    speed: float
    # of a step
    seconds: float
    # standard deviation of the logarithm of the speed
    uncertainty: float


@dataclass
class _Decision:
    arm: _Arm
    trial: bool
    step_seconds: float
    # tokens per second and row of the best strategy
    best_speed: float


class _Decisions:
    """The last decision, and those whose runs haven't been observed yet."""

    def __init__(self) -> None:
        self.newest: _Decision | None = None
        self._unsettled: deque[_Decision] = deque(maxlen=_MOST_UNSETTLED)

    def add(self, decision: _Decision) -> None:
        self.newest = decision
        self._unsettled.append(decision)

    def take(self, arm: _Arm) -> _Decision | None:
        """Return the oldest decision for this strategy; earlier ones were never observed."""
        if all(decision.arm != arm for decision in self._unsettled):
            return None
        while (decision := self._unsettled.popleft()).arm != arm:
            pass
        return decision


class AdaptivePolicy:
    def __init__(self) -> None:
        self._passes = PassCost()
        drafter = ProposalCost(_DRAFT)
        self._proposals: dict[_Proposer, ProposalCost] = {
            "ngram": ProposalCost(_LOOKUP),
            "noisy": drafter,
            "plain": drafter,
        }
        self._acceptances: dict[tuple[_Proposer, int], Acceptance] = {}
        self._arms: list[_Arm] = []
        self._decisions = _Decisions()
        self._steps = _FIRST_STEPS
        # plain steps that trials may still cost, and that may be lost
        self._budget = _TRIALS_GRANTED
        self._account = _LOSS_GRANTED
        # plain steps that the time decoded since both were granted would have sufficed for
        self._since_grant = math.inf

    def set_strategies(self, strategies: Sequence[Strategy]) -> None:
        if not strategies:
            raise ValueError("a policy needs at least one strategy to choose from")
        self._arms = [_arm(strategy) for strategy in strategies]
        self._decisions = _Decisions()

    def choose(self, batch: int, context: int, random: float) -> Choice:
        predictions = self._predict(batch, context)
        best = _find_best(self._arms, predictions)
        plain = self._passes.seconds(batch, context, 0)
        chosen, trial = best, None
        if self._account <= 0.0:
            chosen = _find_plain(self._arms, otherwise=best)
        else:
            trial = self._best_trial(predictions, best, _trial_steps(batch), plain)
        arm, before = self._arms[chosen if trial is None else trial], self._decisions.newest
        found = predictions[chosen if trial is None else trial]
        self._decisions.add(
            _Decision(arm, trial is not None, found.seconds, predictions[best].speed)
        )
        again = before is not None and before.arm == arm
        if trial is not None:
            # deciding takes time, too
            steps = _MOST_TRIAL_STEPS if again else _trial_steps(batch)
            return Choice(arm.strategy, batch * found.speed, "explore", steps)
        confirmed = again or (before is not None and before.trial)
        most = _MOST_STEPS if arm.proposer is not None else _MOST_PLAIN_STEPS
        self._steps = min(2 * self._steps, most) if confirmed else _FIRST_STEPS
        why = "only" if len(self._arms) == 1 else "best"
        return Choice(arm.strategy, batch * found.speed, why, self._steps)

    def observe(self, run: RunObservation) -> None:
        arm = _arm(run.strategy)
        if run.full_passes and run.pass_seconds > 0.0:
            self._passes.observe(
                run.batch, run.context, arm.drafts, run.pass_seconds, run.full_passes
            )
        plain = self._passes.seconds(run.batch, run.context, 0)
        if arm.proposer is not None:
            if run.proposals:
                share = run.proposal_seconds / arm.proposals / plain
                self._proposals[arm.proposer].observe(run.batch, share)
            self._acceptance(arm.proposer, run.batch).observe(run.reached, run.accepted)
        for acceptance in self._acceptances.values():
            acceptance.age(run.steps)
        if (decision := self._decisions.take(arm)) is not None:
            self._settle(decision, run, plain)

    def handle_drafter_swap(self) -> None:
        for (proposer, _), acceptance in self._acceptances.items():
            if proposer != "ngram":
                acceptance.limit_weight(_OLD_DRAFTER)
        granted = _GRANTED_SHARE * self._since_grant
        self._budget = _saved(self._budget, granted, _TRIALS_GRANTED)
        self._account = _saved(self._account, granted, _LOSS_GRANTED)
        self._since_grant = 0.0
        self._decisions = _Decisions()

    def handle_weight_swap(self) -> None:
        for acceptance in self._acceptances.values():
            acceptance.limit_weight(_OLD_WEIGHTS)

    def predict_speeds(self, batch: int, context: int) -> dict[Strategy, float]:
        """Return the predicted tokens per second of every available strategy."""
        predictions = self._predict(batch, context)
        return {
            arm.strategy: batch * each.speed
            for arm, each in zip(self._arms, predictions, strict=True)
        }

    def _predict(self, batch: int, context: int) -> list[_Prediction]:
        deepest = max(arm.drafts for arm in self._arms)
        plain = self._passes.seconds(batch, context, 0)
        expected: dict[_Proposer, list[float]] = {}
        predictions: list[_Prediction] = []
        for arm in self._arms:
            seconds = self._passes.seconds(batch, context, arm.drafts)
            if arm.proposer is None:
                predictions.append(_Prediction(1.0 / seconds, seconds, 0.0))
                continue
            acceptance = self._acceptance(arm.proposer, batch)
            if arm.proposer not in expected:
                expected[arm.proposer] = acceptance.expected_accepts(deepest)
            accepts = expected[arm.proposer]
            seconds += arm.proposals * self._proposals[arm.proposer].share(batch) * plain
            uncertainty = math.hypot(
                acceptance.uncertainty(accepts, arm.drafts),
                self._passes.uncertainty(batch, context, arm.drafts),
            )
            speed = (1.0 + accepts[arm.drafts]) / seconds
            predictions.append(_Prediction(speed, seconds, uncertainty))
        return predictions

    def _best_trial(
        self, predictions: Sequence[_Prediction], best: int, steps: int, plain: float
    ) -> int | None:
        """Return the strategy whose expected gain exceeds the cost of a trial by the most.

        Both are counted in steps of the best strategy. None: the budget has to grow first.
        """
        found, most, price = None, 0.0, 0.0
        for index, each in enumerate(predictions):
            if index == best or each.uncertainty == 0.0:
                continue
            cost = steps * (1.0 - each.speed / predictions[best].speed)
            cost = max(cost, _LEAST_TRIAL * plain / each.seconds)
            if cost * each.seconds > _TRIALS_SAVED * plain:
                continue
            behind = math.log(predictions[best].speed / each.speed)
            worth = _HORIZON * _expected_gain(behind, each.uncertainty)
            if worth - cost > most:
                found, most, price = index, worth - cost, cost * each.seconds
        return found if price <= self._budget * plain else None

    def _settle(self, decision: _Decision, run: RunObservation, plain: float) -> None:
        """Pay for what a run lost, in plain steps; a gain is saved up to a limit."""
        seconds = min(run.seconds, _INTERRUPTED * run.steps * decision.step_seconds)
        if not 0.0 < seconds < math.inf:
            return
        self._since_grant += seconds / plain
        tokens = run.steps + sum(run.accepted) / run.batch
        earned = _TRIAL_SHARE * seconds
        if decision.trial:
            charged = min(seconds, _CHARGED * run.steps * decision.step_seconds)
            earned += tokens / decision.best_speed - charged
        self._budget = _saved(self._budget, earned / plain, _TRIALS_SAVED)
        earned = _LOSS_SHARE * seconds
        if decision.arm.proposer is not None:
            earned += tokens * plain - seconds
        self._account = _saved(self._account, earned / plain, _LOSS_SAVED)

    def _acceptance(self, proposer: _Proposer, batch: float) -> Acceptance:
        bucket = bucket_of(batch) if proposer == "ngram" else 1
        found = self._acceptances.get((proposer, bucket))
        if found is None:
            prior = _NGRAM_PRIOR if proposer == "ngram" else _DRAFTER_PRIOR
            found = self._acceptances[proposer, bucket] = Acceptance(prior)
        return found


def _arm(strategy: Strategy) -> _Arm:
    drafts = max_drafts(strategy)
    match strategy:
        case Off():
            return _Arm(strategy, None, 0, 0)
        case Ngram():
            return _Arm(strategy, "ngram", drafts, 1)
        case Draft(noise=noise):
            return _Arm(strategy, "noisy" if noise else "plain", drafts, drafts)


def _find_plain(arms: Sequence[_Arm], otherwise: int) -> int:
    plain = (index for index, arm in enumerate(arms) if arm.proposer is None)
    return next(plain, otherwise)


def _find_best(arms: Sequence[_Arm], predictions: Sequence[_Prediction]) -> int:
    """Return the fastest strategy, or plain decoding if that is hardly slower."""
    best = max(range(len(predictions)), key=lambda index: predictions[index].speed)
    plain = _find_plain(arms, otherwise=best)
    hardly = predictions[plain].speed * _LEAST_GAIN > predictions[best].speed
    return plain if hardly else best


def _trial_steps(batch: int) -> int:
    return max(1, min(_TRIAL_STEPS, _TRIAL_ROWS // batch))


def _saved(steps: float, earned: float, most: float) -> float:
    return min(steps + earned, max(steps, most))


def _expected_gain(behind: float, deviation: float) -> float:
    """Return the mean of the positive part of a normal variable with mean `-behind`."""
    z = behind / deviation
    density = math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return deviation * (density - z * 0.5 * math.erfc(z / math.sqrt(2.0)))
