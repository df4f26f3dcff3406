"""A simulated worker that decodes rollouts, as a strategy policy sees it.

A policy sees noisy timings and counts of sampled acceptances. It is judged by the true times, so
luck with the noise doesn't help.
"""

import math
from collections.abc import Callable, Sequence
from random import Random

import msgspec

from tlt.base.strategies import Draft, Ngram, Off, Strategy
from tlt.policies.speculation.strategy_policy import StepObservation, StrategyPolicy
from tlt.policies.speculation.strategy_runs import StrategyRuns

ARMS: tuple[Strategy, ...] = (
    Off(),
    *(Ngram(tokens=tokens) for tokens in (2, 4, 8)),
    *(Draft(depth=depth, noise=noise) for noise in (True, False) for depth in (1, 2, 4, 6, 8)),
)
# a step of 48 layers of width 64, measured on a CPU: tokens per second by batch
_PLAIN = {1: 366.0, 2: 444.0, 4: 575.0, 8: 791.0, 16: 971.0, 32: 1218.0, 64: 1401.0}
_PROMPT = 32


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of decode steps in seconds."""

    # cost of a verified token beyond the first, relative to a plain step, at batch 1 and 64
    token_at_1: float = 0.03
    token_at_64: float = 0.12
    draft_step: float = 0.05
    lookup: float = 0.01
    context: float = 3.5e-7
    # tokens from which on a pass uses another matrix kernel, and the factor of its cost
    kernel_from: int = 40
    kernel: float = 1.12
    # for each row whose drafter must catch up, and for each token that it catches up with
    catch_up: float = 2e-5
    noise: float = 0.12
    outliers: float = 0.01

    def plain(self, batch: int) -> float:
        position = math.log2(batch)
        low = min(int(position), 5)
        below, above = _PLAIN[2**low], _PLAIN[2 ** (low + 1)]
        return batch / math.exp(
            math.log(below) + (position - low) * (math.log(above) - math.log(below))
        )

    def passing(self, drafted: int, batch: int, context: int) -> float:
        share = min(math.log2(batch) / 6, 1.0)
        slope = self.token_at_1 + share * (self.token_at_64 - self.token_at_1)
        seconds = self.plain(batch) * (1 + slope * drafted)
        if batch * (1 + drafted) >= self.kernel_from:
            seconds *= self.kernel
        return seconds + self.context * context * (1 + 0.3 * drafted)

    def proposing(self, strategy: Strategy, batch: int) -> float:
        match strategy:
            case Off():
                return 0.0
            case Ngram():
                return self.lookup * self.plain(batch)
            case Draft(depth=depth):
                return self.draft_step * self.plain(batch) * depth


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance by the share of the job that is done."""

    drafter: Callable[[float], float]
    ngram: Callable[[float], float]
    # added to that in proportion to the finished answers
    siblings: float = 0.0
    # loss of acceptance without the policy's noise
    noise_gain: float = 0.04
    # shares of the job at which the first drafter comes and where it is swapped
    drafter_from: float = 0.0
    swaps: tuple[float, ...] = ()

    def rates(self, strategy: Strategy, done: float, ended: float) -> list[float]:
        """Return the acceptance rates by depth; they vary as texts have periods.

        `ended` is the share of finished answers.
        """
        match strategy:
            case Off():
                return []
            case Ngram(tokens=tokens):
                # probability that a matching n-gram continues to match
                first = self.ngram(done) + self.siblings * ended
                return [first, *(0.5 * (first + 0.9) for _ in range(tokens - 1))]
            case Draft(depth=depth, noise=noise):
                base = self.drafter(done) - (0.0 if noise else self.noise_gain)
                rates = [base - 0.01 * j - (0.05 if j % 3 == 2 else 0.0) for j in range(depth)]
                return [min(max(rate, 0.0), 0.98) for rate in rates]


class Outcome(msgspec.Struct, kw_only=True):
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    explored: int = 0
    # by tokens: seconds more than the oracle's choices would have taken
    regret: list[tuple[int, float]] = []

    @property
    def share(self) -> float:
        return 1.0 - self.regret[-1][1] / self.seconds


class Oracle:
    """Knows the true rates and chooses the best strategy for the next decode step."""

    def __init__(self, machine: Machine, text: Text) -> None:
        self._machine = machine
        self._text = text

    def speed(
        self, strategy: Strategy, batch: int, context: int, done: float, ended: float
    ) -> float:
        tokens, survival = 1.0, 1.0
        rates = self._text.rates(strategy, done, ended)
        for rate in rates:
            survival *= rate
            tokens += survival
        seconds = self._machine.passing(len(rates), batch, context)
        return batch * tokens / (seconds + self._machine.proposing(strategy, batch))

    def best(
        self, arms: Sequence[Strategy], batch: int, context: int, done: float, ended: float
    ) -> tuple[Strategy, float]:
        speeds = [(self.speed(arm, batch, context, done, ended), i) for i, arm in enumerate(arms)]
        speed, index = max(speeds)
        return arms[index], speed


Rows = list[int]


def lengths(batch: int, random: Random) -> Rows:
    """Draw the lengths of one rollout: most are short, a few are very long."""
    return [min(20 + int(random.lognormvariate(4.9, 0.7)), 900) for _ in range(batch)]


def run(
    policy: StrategyPolicy | None, machine: Machine, text: Text, rollouts: list[Rows], seed: int
) -> Outcome:
    """Decode all rollouts in turn, each until its last row ends.

    Without a policy the oracle chooses the strategies.
    """
    runs = None if policy is None else StrategyRuns(policy, Random(seed).random)
    return decode(runs, machine, text, rollouts, seed)


def decode(
    runs: StrategyRuns | None, machine: Machine, text: Text, rollouts: list[Rows], seed: int
) -> Outcome:
    """Decode as `run` does, with a policy whose runs the caller follows."""
    job = _Job(machine, text, rollouts, seed)
    job.run(runs)
    return job.outcome


class _Job:
    def __init__(self, machine: Machine, text: Text, rollouts: list[Rows], seed: int) -> None:
        self.outcome = Outcome()
        self._machine = machine
        self._text = text
        self._oracle = Oracle(machine, text)
        self._rollouts = rollouts
        self._total = sum(map(sum, rollouts))
        self._random = Random(seed)
        self._arms: Sequence[Strategy] = ()
        self._swaps = list(text.swaps)
        # tokens of each row that the drafter has not processed
        self._behind = 0
        self._started = 0

    def run(self, policy: StrategyRuns | None) -> None:
        for rollout in self._rollouts:
            left, self._behind, self._started = list(rollout), 0, len(rollout)
            if policy is not None:
                policy.handle_weight_swap()
            while left:
                self._apply_due_changes(policy)
                left = self._decode_step(policy, left)

    @property
    def _share_done(self) -> float:
        return self.outcome.tokens / self._total

    def _apply_due_changes(self, policy: StrategyRuns | None) -> None:
        """Apply the first drafter or a swap when it is due."""
        ready = self._share_done >= self._text.drafter_from
        arms = [arm for arm in ARMS if ready or not isinstance(arm, Draft)]
        if len(arms) != len(self._arms):
            self._arms = arms
            if policy is not None:
                policy.set_strategies(arms)
        if self._swaps and self._share_done >= self._swaps[0]:
            self._swaps.pop(0)
            if policy is not None:
                policy.handle_drafter_swap()

    def _decode_step(self, policy: StrategyRuns | None, left: Rows) -> Rows:
        outcome, done = self.outcome, self._share_done
        batch = len(left)
        context = batch * _PROMPT + outcome.steps % 300 * batch
        ended = 1.0 - batch / self._started
        best, speed = self._oracle.best(self._arms, batch, context, done, ended)
        strategy = best
        if policy is not None:
            choice = policy.choose(batch, context)
            strategy = choice.strategy
            outcome.explored += choice.why == "explore"
        rates = self._text.rates(strategy, done, ended)
        reached, accepted, left_after, tokens = self._accept(rates, left)
        proposing = self._machine.proposing(strategy, batch)
        if isinstance(strategy, Draft):
            proposing += self._machine.catch_up * batch * self._behind
            self._behind = 0
        else:
            self._behind += 1
        passing = self._machine.passing(len(rates), batch, context)
        if policy is not None:
            noisy = proposing * self._noise_factor()
            seconds = noisy + passing * self._noise_factor()
            policy.observe(
                StepObservation(strategy, batch, context, seconds, noisy, reached, accepted)
            )
        outcome.tokens += tokens
        outcome.steps += 1
        outcome.seconds += passing + proposing
        expected = self._oracle.speed(strategy, batch, context, done, ended) * (passing + proposing)
        lost = passing + proposing - expected / speed
        before = outcome.regret[-1][1] if outcome.regret else 0.0
        outcome.regret.append((outcome.tokens, before + lost))
        return left_after

    def _accept(self, rates: Sequence[float], left: Rows) -> tuple[list[int], list[int], Rows, int]:
        reached, accepted = [0] * len(rates), [0] * len(rates)
        after: Rows = []
        tokens = 0
        for remaining in left:
            got = 0
            for j, rate in enumerate(rates):
                if got == remaining:
                    break
                reached[j] += 1
                if self._random.random() >= rate:
                    break
                accepted[j] += 1
                got += 1
            got = min(got + 1, remaining)
            tokens += got
            if remaining > got:
                after.append(remaining - got)
        return reached, accepted, after, tokens

    def _noise_factor(self) -> float:
        factor = self._random.lognormvariate(0.0, self._machine.noise)
        return factor * 10 if self._random.random() < self._machine.outliers else factor
