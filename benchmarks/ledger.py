"""Compare the savings that jobs claim with the truth, in simulated jobs where that is known.

`python -m benchmarks.ledger --out F.json [--jobs 1000]`

Half of the jobs decode with chains of drafts of one length, the others with the adaptive strategy,
all with control runs as by default. The jobs differ in ranks, slots, lengths, costs and acceptance,
which differs from answer to answer too. The machine's speed drifts, and decoding is slower while an
idle rank trains. The truth is the time that the same answers take without speculation, at the same
speeds and without training. What is tested is what a real job runs: the strategy, control runs,
tallies, the replay of batches, and the estimate.
"""

import argparse
import heapq
import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import NamedTuple

from benchmarks.decoding_world import Machine
from benchmarks.result import Claim, write_result
from tlt.base.strategies import Draft, Off, max_drafts
from tlt.policies.speculation import savings_estimate
from tlt.policies.speculation.configured_policy import configured_policy
from tlt.policies.speculation.plain_replay import replay
from tlt.policies.speculation.savings_estimate import DecodeAccount
from tlt.policies.speculation.strategy_policy import StepObservation, rows_by_depth
from tlt.policies.speculation.strategy_runs import StrategyRuns
from tlt.policies.speculation.strategy_tallies import TallyCollector
from tlt.spec.config import SpeculationSpec

_JOBS, _PROCESSES = 1000, 2
# decode steps of a job without speculation, on all ranks
_STEPS = 80_000
_STEPS_BETWEEN_REPORTS = 64
_PROMPT = 32
# standard deviations of the logarithms: of a batch's speed, and of that of its parts
_DRIFT_OF_BATCHES, _DRIFT_WITHIN = 0.1, 0.05
_PARTS = 8
_DEPTHS = (1, 2, 4, 6)


class Truth(NamedTuple):
    """Rank seconds of a job without speculation and with it, and what the job claims."""

    adaptive: bool
    off: float
    spent: float
    seconds: float
    low: float
    high: float

    @property
    def saved(self) -> float:
        return self.off - self.spent

    @property
    def covered(self) -> bool:
        return self.low <= self.saved <= self.high


@dataclass
class _Answer:
    left: int
    acceptance: float
    context: int = _PROMPT


class _World:
    """A job's machine and answers."""

    def __init__(self, seed: int) -> None:
        dice = Random(seed)
        self.ranks = dice.choice([1, 2, 3])
        self.slots = dice.choice([4, 8, 16, 32])
        self.depth = dice.choice(_DEPTHS)
        self.machine = Machine(
            token_at_1=dice.uniform(0.02, 0.2),
            token_at_64=dice.uniform(0.1, 0.6),
            draft_step=dice.uniform(0.02, 0.15),
            context=dice.uniform(0.0, 1e-6),
            noise=dice.uniform(0.03, 0.2),
            outliers=dice.choice([0.0, 0.005]),
        )
        # share of a plain step that being able to speculate costs
        self.overhead = dice.uniform(0.0, 0.02)
        # factor of a step beside a rank that trains, if idle ranks train
        self.slowdown = dice.choice([1.0, dice.uniform(1.02, 1.2)])
        typical, spread = dice.uniform(40, 150), dice.uniform(0.3, 1.0)
        usual = dice.uniform(0.2, 0.85)
        count = round(self.ranks * self.slots * dice.uniform(0.5, 3.0))
        self.batches: list[list[tuple[int, float]]] = []
        steps = 0.0
        while steps < _STEPS:
            batch = [
                (
                    max(4, min(900, round(typical * dice.lognormvariate(0.0, spread)))),
                    min(0.95, max(0.05, dice.gauss(usual, 0.15))),
                )
                for _ in range(count)
            ]
            self.batches.append(batch)
            lengths = [length for length, _ in batch]
            steps += sum(replay(lengths, self.ranks, self.slots, lambda rows: 1.0).steps.values())
        # factors of the seconds, by batch and by the part of it that is done
        self.speeds = [
            [batch * dice.lognormvariate(0.0, _DRIFT_WITHIN) for _ in range(_PARTS)]
            for batch in (dice.lognormvariate(0.0, _DRIFT_OF_BATCHES) for _ in self.batches)
        ]

    def noise(self, dice: Random) -> float:
        factor = dice.lognormvariate(0.0, self.machine.noise)
        return factor * 5.0 if dice.random() < self.machine.outliers else factor

    @property
    def mean_noise(self) -> float:
        return math.exp(self.machine.noise**2 / 2) * (1.0 + 4.0 * self.machine.outliers)


class _Rank:
    """Decodes with speculation if it is given a strategy, and without noise otherwise."""

    def __init__(self, world: _World, runs: StrategyRuns | None, dice: Random) -> None:
        self._world = world
        self._runs = runs
        self._dice = dice
        self.tallies = TallyCollector()
        self.rows: list[_Answer] = []
        self.seconds = self.now = 0.0

    def step(self, speed: float, beside: bool) -> int:
        """Decode a step and return its tokens."""
        world, rows, dice = self._world, len(self.rows), self._dice
        context = sum(row.context for row in self.rows)
        if self._runs is None:
            seconds = world.machine.passing(0, rows, context) * speed * world.mean_noise
            return self._advance([1] * rows, seconds)
        choice = self._runs.choose(rows, context)
        depth = max_drafts(choice.strategy)
        accepted = [min(row.left - 1, _accepted(row.acceptance, depth, dice)) for row in self.rows]
        kept = [right + 1 for right in accepted]
        factor = speed * world.noise(dice) * (world.slowdown if beside else 1.0)
        passing = world.machine.passing(depth, rows, context) * factor
        proposing = world.machine.proposing(choice.strategy, rows) * factor
        overhead = world.overhead * world.machine.plain(rows) * factor
        seconds = passing + proposing + overhead
        self.tallies.add(choice, None, rows, sum(kept), seconds, seconds, overhead)
        right = rows_by_depth(accepted, depth)
        reached = [rows, *right][:depth]
        self._runs.observe(
            StepObservation(
                choice.strategy, rows, context, passing + proposing, proposing, reached, right
            )
        )
        return self._advance(kept, seconds)

    def _advance(self, kept: Sequence[int], seconds: float) -> int:
        self.now += seconds
        self.seconds += seconds
        for row, count in zip(self.rows, kept, strict=True):
            row.left -= count
            row.context += count
        self.rows = [row for row in self.rows if row.left > 0]
        return sum(kept)


@dataclass
class _Job:
    """A job in a world, with speculation or without."""

    world: _World
    speculates: bool
    adaptive: bool
    seed: int
    account: DecodeAccount = field(default_factory=DecodeAccount)

    def run(self) -> float:
        """Return the rank seconds of decoding."""
        ranks = [
            _Rank(self.world, self._runs(rank), Random(self.seed + rank))
            for rank in range(self.world.ranks)
        ]
        for batch, speeds in zip(self.world.batches, self.world.speeds, strict=True):
            self._decode(ranks, batch, speeds)
            if self.speculates:
                lengths = [length for length, _ in batch]
                plain = savings_estimate.plain_step_costs(self.account)
                seconds_of = plain.seconds if plain is not None else math.sqrt
                replayed = replay(lengths, len(ranks), self.world.slots, seconds_of)
                self.account = savings_estimate.add_replay(self.account, replayed)
        return math.fsum(rank.seconds for rank in ranks)

    def _runs(self, rank: int) -> StrategyRuns | None:
        if not self.speculates:
            return None
        share = SpeculationSpec(mode="adaptive").control_share
        fixed = None if self.adaptive else Draft(depth=self.world.depth)
        policy = configured_policy(fixed, share)
        policy.set_strategies([Off(), *(Draft(depth=depth) for depth in _DEPTHS)])
        return StrategyRuns(policy, Random(self.seed - 1 - rank).random)

    def _decode(
        self, ranks: Sequence[_Rank], batch: Sequence[tuple[int, float]], speeds: Sequence[float]
    ) -> None:
        waiting = deque(_Answer(*answer) for answer in batch)
        tokens, done = sum(length for length, _ in batch), 0
        share = min(self.world.slots, -(-len(batch) // len(ranks)))
        for rank in ranks:
            rank.now = 0.0
            while waiting and len(rank.rows) < share:
                rank.rows.append(waiting.popleft())
        due = [(0.0, index) for index in range(len(ranks))]
        busy = set(range(len(ranks)))
        steps = 0
        while due:
            _, index = heapq.heappop(due)
            rank = ranks[index]
            while waiting and len(rank.rows) < self.world.slots:
                rank.rows.append(waiting.popleft())
            beside = len(busy) < len(ranks)
            if not rank.rows:
                busy.discard(index)
                self._report(rank, beside, idle=True)
                continue
            done += rank.step(speeds[_PARTS * done // tokens], beside)
            steps += 1
            if steps % _STEPS_BETWEEN_REPORTS == 0:
                self._report(rank, beside, idle=False)
            heapq.heappush(due, (rank.now, index))

    def _report(self, rank: _Rank, beside: bool, idle: bool) -> None:
        tallies = rank.tallies.take(idle)
        self.account = savings_estimate.add_tallies(self.account, tallies, beside)


def _accepted(acceptance: float, depth: int, dice: Random) -> int:
    count = 0
    while count < depth and dice.random() < acceptance:
        count += 1
    return count


def simulate(seed: int) -> Truth | None:
    """Return None if the job has too few control runs for a claim."""
    world, adaptive = _World(seed), seed % 2 == 1
    off = _Job(world, speculates=False, adaptive=adaptive, seed=seed).run()
    job = _Job(world, speculates=True, adaptive=adaptive, seed=seed)
    spent = job.run()
    savings = savings_estimate.estimate_savings(job.account, open_seconds=0.0)
    if savings is None:
        return None
    total = savings.total
    return Truth(adaptive, off, spent, total.seconds, total.low, total.high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=_JOBS)
    arguments = parser.parse_args()
    began = time.monotonic()
    with ProcessPoolExecutor(_PROCESSES) as pool:
        found = list(pool.map(simulate, range(arguments.jobs), chunksize=4))
    known = [truth for truth in found if truth is not None]
    errors = [(truth.seconds - truth.saved) / truth.off for truth in known]
    widths = [(truth.high - truth.low) / 2 / truth.off for truth in known]
    coverage = fmean(truth.covered for truth in known)
    claims = [
        Claim(
            name="ledger.coverage_error",
            value=round(abs(coverage - 0.95), 4),
            unit="",
            bar=0.02,
            less_is_better=True,
        ),
        Claim(
            name="ledger.half_width",
            value=round(median(widths), 4),
            unit="of off",
            bar=0.03,
            less_is_better=True,
        ),
    ]
    details = {
        "jobs": len(known),
        "coverage": round(coverage, 4),
        "coverage_of_adaptive_jobs": round(
            fmean(truth.covered for truth in known if truth.adaptive), 4
        ),
        "without_claim": len(found) - len(known),
        "bias": round(fmean(errors), 5),
        "mean_absolute_error": round(fmean(map(abs, errors)), 5),
        "saved_share": [round(truth.saved / truth.off, 3) for truth in known[:20]],
        "too_high": sum(truth.low > truth.saved for truth in known),
        "too_low": sum(truth.high < truth.saved for truth in known),
    }
    write_result("ledger", claims, details, time.monotonic() - began, arguments.out)


if __name__ == "__main__":
    main()
