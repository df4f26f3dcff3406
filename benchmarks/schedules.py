"""Compare the gate of drafter training with two naive schedules, in simulated jobs.

`python -m benchmarks.schedules --out F.json`

A job starts without a drafter. The gate decides as in a real job who trains when; the naive
schedules train in idle seconds alone, or with all workers to the plateau right after the first
step. Jobs differ in their length, in how much idle time their steps leave, in how fast and how far
a drafter learns, and in what a better one is worth, none of which the gate is told. A drafter that
reads the same answers again learns less from them.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median

import msgspec

from benchmarks.result import Claim, write_result
from tlt.base.id_types import DrafterVersion, Step
from tlt.policies.drafter import payoff_evidence, speedup_model
from tlt.policies.drafter import training_payoff_gate as gate
from tlt.policies.drafter.payoff_evidence import PayoffEvidence
from tlt.policies.drafter.training_payoff_gate import Judgement, TrainingOutlook
from tlt.policies.drafter.training_totals import TrainingProgress
from tlt.protocol.refs import DrafterBase
from tlt.protocol.shared_values import DrafterEvaluation
from tlt.spec.config import (
    AlgorithmSpec,
    DataSpec,
    DrafterSpec,
    JobSpec,
    PolicySpec,
    RewardSpec,
    SpeculationSpec,
)

_LENGTHS = (8, 30, 60, 200)
_JOBS = 60
_WORKERS = 2
_MICRO_BATCH = 1024
# readings of an answer after which another one teaches a third as much
_READINGS = 10.0
# decoding lost beside a worker that trains, as a share of its idle seconds
_SLOWED = 0.1
# error of an evaluation on a few answers, and that of a speedup, relative
_ERROR = 0.1
_SPEEDUP_ERROR = 0.1
# share of a single member's micro-batches that several members' are worth
_MERGED = 0.85


@dataclass(frozen=True)
class _World:
    steps: int
    # seconds of a rollout without speculation, and of the policy update
    rollout: float
    update: float
    # share of a worker's rollout seconds that it idles
    idle: float
    answer_tokens: int
    rate: float
    ngrams: float
    plateau: float
    # micro-batches until two thirds of the rise are done
    span: float
    # power of the accept length by which rollouts speed up; 0 where proposing costs what it gains
    gain: float

    @classmethod
    def draw(cls, steps: int, seed: int) -> "_World":
        dice = Random(seed)
        rollout = math.exp(dice.uniform(math.log(2.0), math.log(60.0)))
        return cls(
            steps,
            rollout,
            dice.uniform(0.3, 1.0) * rollout,
            dice.uniform(0.0, 0.4),
            round(math.exp(dice.uniform(math.log(4e3), math.log(4e5)))),
            dice.uniform(5.0, 30.0),
            dice.uniform(1.0, 1.5),
            dice.uniform(1.5, 6.0),
            math.exp(dice.uniform(math.log(80.0), math.log(600.0))),
            dice.choice([0.0, *(dice.uniform(0.4, 0.65) for _ in range(3))]),
        )

    def speedup(self, length: float) -> float:
        return (self.ngrams**4 + length ** (4 * self.gain) - 1.0) ** 0.25


class _Drafter:
    def __init__(self, world: _World, seed: int) -> None:
        self._world = world
        self._dice = Random(seed)
        self._learnt = 0.0
        self.merged = 0.0
        self._version = 0
        self.progress = TrainingProgress()
        self.evidence = PayoffEvidence()
        self.length: float = 1.0
        self._used: float | None = None

    def train(self, micro_batches: float, step: int, seconds: float, idle: bool) -> None:
        """Train, and evaluate after as many micro-batches as a job does."""
        world, before = self._world, self.progress
        fresh = math.exp(-before.tokens_read / (_READINGS * max(1, before.answer_tokens)))
        self._learnt += micro_batches * fresh
        self.progress = TrainingProgress(
            held_out={Step(step): ()},
            answer_tokens=before.answer_tokens,
            micro_batches=before.micro_batches + round(micro_batches),
            tokens_read=before.tokens_read + round(micro_batches * _MICRO_BATCH),
            seconds=before.seconds + seconds,
            idle_micro_batches=before.idle_micro_batches + (round(micro_batches) if idle else 0),
        )
        if self.progress.micro_batches - self.merged >= DrafterSpec().merge_every or not idle:
            self.merged = self.progress.micro_batches
            now = 1.0 + (world.plateau - 1.0) * (1.0 - math.exp(-self._learnt / world.span))
            self._evaluate(now, step)

    def add_answers(self, step: int) -> None:
        tokens = self.progress.answer_tokens + self._world.answer_tokens
        self.progress = msgspec.structs.replace(
            self.progress, answer_tokens=tokens, held_out={Step(step): ()}
        )

    def measure_speedup(self, in_use: float) -> None:
        """Learn from a rollout with this accept length, unless the drafter was swapped in it."""
        if self.length != in_use or self.evidence.curve is None:
            return
        without = self._world.ngrams
        predicted = speedup_model.with_drafter(self.evidence.curve.now, without) - without
        error = _SPEEDUP_ERROR * without
        measured = self._world.speedup(in_use) - without + self._dice.gauss(0.0, error)
        self.evidence = payoff_evidence.record_speedup(self.evidence, predicted, measured, error)

    def _evaluate(self, now: float, step: int) -> None:
        self._version += 1
        trained = max(1.0, now + self._dice.gauss(0.0, _ERROR))
        evaluation = DrafterEvaluation(
            accept_length_before=self._used, accept_length=trained, answers=8
        )
        base = DrafterBase(
            version=DrafterVersion(self._version),
            weights=None,
            root=DrafterVersion(0),
            updates=0,
            micro_batches=self.progress.micro_batches,
        )
        self.evidence = payoff_evidence.record_evaluation(
            self.evidence, evaluation, base, Step(step)
        )
        if gate.judge_evaluation(evaluation) is Judgement.ADOPT:
            self.evidence = payoff_evidence.record_success(self.evidence, Step(step))
            self.length, self._used = now, trained
        else:
            self.evidence = payoff_evidence.record_failure(self.evidence, Step(step))


_Schedule = Callable[[_World, _Drafter, TrainingOutlook], tuple[bool, float]]


def _spec(steps: int) -> JobSpec:
    return JobSpec(
        policy=PolicySpec(path="/policy"),
        data=DataSpec(train="/train.jsonl"),
        reward=RewardSpec(kind="numeric"),
        algorithm=AlgorithmSpec(steps=steps, prompts_per_step=4, group_size=8),
        speculation=SpeculationSpec(mode="adaptive"),
        drafter=DrafterSpec(train="auto"),
    )


def _by_gate(world: _World, drafter: _Drafter, outlook: TrainingOutlook) -> tuple[bool, float]:
    spec = _spec(world.steps)
    idle = gate.judge_idle_training(spec, drafter.evidence, outlook)
    reserved = gate.judge_reserved_time(spec, drafter.evidence, outlook)
    return idle.worth, reserved.cost if reserved.worth else 0.0


def _idle_only(world: _World, drafter: _Drafter, outlook: TrainingOutlook) -> tuple[bool, float]:
    return True, 0.0


def _plateau_first(
    world: _World, drafter: _Drafter, outlook: TrainingOutlook
) -> tuple[bool, float]:
    """Train after the first step until the drafter has done nine tenths of its rise."""
    micro_batches = 2.3 * world.span if outlook.step == 0 else 0.0
    return True, micro_batches / (_WORKERS * world.rate * _MERGED)


def _seconds(world: _World, schedule: _Schedule, seed: int) -> float:
    """Return the seconds of a job; reserved time is reviewed after each evaluation."""
    drafter, total = _Drafter(world, seed), 0.0
    for step in range(world.steps):
        in_use = drafter.length
        rollout = world.rollout / world.speedup(in_use)
        train, _ = schedule(world, drafter, _outlook(world, drafter, step, rollout, opened=True))
        if train:
            idle = world.idle * rollout
            drafter.train(idle * world.rate, step, idle, idle=True)
            rollout += _SLOWED * idle
        drafter.add_answers(step)
        drafter.measure_speedup(in_use)
        total += rollout + world.update
        while True:
            outlook = _outlook(world, drafter, step, rollout, opened=False)
            _, reserved = schedule(world, drafter, outlook)
            if reserved <= 0.0:
                break
            rate = _WORKERS * world.rate * _MERGED
            stretch = min(reserved, DrafterSpec().merge_every / rate)
            if schedule is _plateau_first:
                stretch = reserved
            drafter.train(stretch * rate, step, stretch * _WORKERS, idle=False)
            total += stretch
            if schedule is _plateau_first:
                break
    return total


def _outlook(
    world: _World, drafter: _Drafter, step: int, rollout: float, opened: bool
) -> TrainingOutlook:
    progress = drafter.progress
    return TrainingOutlook(
        step=Step(step),
        newest_step=progress.newest_step,
        steps=max(0, world.steps - step - 1),
        rollout_seconds=rollout,
        members=_WORKERS,
        micro_batches_per_second=progress.micro_batch_rate,
        speedup_without_drafter=world.ngrams,
        learnable_micro_batches=progress.learnable_micro_batches,
        unmerged_micro_batches=progress.micro_batches - drafter.merged,
        idle_micro_batches=progress.idle_micro_batches / (step + (0 if opened else 1) or 1),
        reserved_seconds=progress.reserved_micro_batches / progress.micro_batch_rate / _WORKERS,
        planned_seconds=rollout * world.steps,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    details: dict[str, dict[str, float]] = {}
    for steps in _LENGTHS:
        ratios: list[float] = []
        against: dict[str, list[float]] = {"idle": [], "plateau": [], "ngrams": []}
        for seed in range(_JOBS):
            world = _World.draw(steps, seed)
            ours, idle, plateau = (
                _seconds(world, schedule, seed)
                for schedule in (_by_gate, _idle_only, _plateau_first)
            )
            none = steps * (world.rollout / world.ngrams + world.update)
            ratios.append(min(idle, plateau) / ours)
            for name, seconds in (("idle", idle), ("plateau", plateau), ("ngrams", none)):
                against[name].append(seconds / ours)
        details[f"{steps} steps"] = {
            "better_naive_over_gate": round(median(ratios), 4),
            "least": round(min(ratios), 4),
            **{f"{name}_over_gate": round(fmean(found), 4) for name, found in against.items()},
            **{f"{name}_least": round(min(found), 4) for name, found in against.items()},
        }
        print(steps, details[f"{steps} steps"], flush=True)
    claims = [
        Claim(
            name="schedules.better_naive_over_gate",
            value=min(found["better_naive_over_gate"] for found in details.values()),
            unit="x",
            bar=0.97,
        ),
        Claim(
            name="schedules.ngrams_over_gate_least",
            value=min(found["ngrams_least"] for found in details.values()),
            unit="x",
            bar=0.97,
        ),
    ]
    write_result("schedules", claims, details, time.monotonic() - began, arguments.out)


if __name__ == "__main__":
    main()
