"""Fit a simulated job to the journal of a run.

A run that speculates reports its decode steps. In others they are timed by a replay: between two
ends of a worker's answers its rows stay the same. The first step is left out, because ranks load
and compile in it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from msgspec.structs import replace

from tlt.base.id_types import Member, PromptIndex, Step, WorkerId
from tlt.base.strategies import Off
from tlt.errors import ConfigError
from tlt.policies.run.chosen_sizes import fewest_slots
from tlt.policies.run.run_state import Phase, RunState, all_engines
from tlt.policies.speculation.savings_estimate import DecodeCost
from tlt.policies.speculation.strategy_policy import bucket_of
from tlt.protocol.commands import IssuePrompts
from tlt.protocol.events import AnyEvent, DecodingReported, RolloutFinished
from tlt.protocol.shared_values import StrategyTally
from tlt.report import Transition
from tlt.report.statistics import mean
from tlt.simulation.answer_groups import Group
from tlt.simulation.engine_speed import EngineSpeed
from tlt.simulation.inputs import DraftCosts, EngineCosts, Inputs, UpdateCosts
from tlt.simulation.scheduler import Job, rollout_seconds
from tlt.simulation.world import Finished, World
from tlt.spec.config import JobSpec

# decode steps of a bucket from which on their mean is believed
_ENOUGH_STEPS = 8
# the purpose of the prompts that open a step, and the group that they replace
_OPENS = ("train", None)
# an answer: prompt, member, tokens, and when it ended
_Ended = tuple[PromptIndex, Member, int, float]


@dataclass
class StepRecord:
    """One step of a run: its seconds, answers and decode steps."""

    prompts: Sequence[PromptIndex]
    opened: float
    closed: float = 0.0
    updated: float = 0.0
    # tokens that its update learned from
    learned: int = 0
    ended: dict[WorkerId, list[_Ended]] = field(default_factory=lambda: defaultdict(list))
    # by bucket: steps without speculation, and those that a speculating job chose
    plain: dict[int, DecodeCost] = field(default_factory=dict)
    chosen: dict[int, DecodeCost] = field(default_factory=dict)

    @property
    def rollout(self) -> float:
        return self.closed - self.opened

    @property
    def update(self) -> float:
        return self.updated - self.closed

    @property
    def groups(self) -> list[list[int]]:
        """Return the lengths of each group's answers, in the order of the queue."""
        groups: dict[PromptIndex, list[int]] = {prompt: [] for prompt in self.prompts}
        for prompt, _, length, _ in sorted(each for own in self.ended.values() for each in own):
            groups[prompt].append(length)
        return [lengths for lengths in groups.values() if lengths]

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.groups))

    def add(self, event: AnyEvent, at: float) -> None:
        match event:
            case RolloutFinished() if event.prompt in self.prompts:
                self.ended[event.worker].append((event.prompt, event.member, event.length, at))
            case DecodingReported():
                self._add_tallies(event.tallies)
            case _:
                pass

    def _add_tallies(self, tallies: Iterable[StrategyTally]) -> None:
        for tally in tallies:
            cost = DecodeCost(tally.steps, tally.rows, tally.tokens, tally.seconds)
            if tally.strategy == Off():
                _add(self.plain, tally.bucket, cost)
            if tally.control is None:
                _add(self.chosen, tally.bucket, cost)

    def time_plain_steps(self, slots: int) -> None:
        """Time the steps of a step that reported none."""
        self.plain = {}
        order = {prompt: place for place, prompt in enumerate(self.prompts)}
        for own in self.ended.values():
            times = sorted(each[3] for each in own)
            queue = sorted(own, key=lambda each: (order[each[0]], each[1]))
            ends = list(_replay([each[2] for each in queue], slots))
            for (before, after), ((first, rows), (second, _)) in zip(
                pairwise(times), pairwise(ends), strict=True
            ):
                steps = second - first
                cost = DecodeCost(steps, steps * rows, steps * rows, after - before)
                _add(self.plain, bucket_of(rows), cost)


class RunFit:
    """Collects a run's steps from its journal."""

    def __init__(self) -> None:
        self._steps: dict[Step, StepRecord] = {}
        self._open: StepRecord | None = None
        self._spec: JobSpec | None = None
        self._workers = 0

    def add(self, transition: Transition) -> None:
        record, event, at = self._open, transition.event, transition.at
        if record is not None:
            if transition.counts and getattr(event, "purpose", None) == "train":
                record.add(event, at)
            self._follow_phase(record, transition)
        for command in transition.commands:
            # prompts in place of others are left out
            if isinstance(command, IssuePrompts) and (command.purpose, command.replaces) == _OPENS:
                self._open = self._steps[command.step] = StepRecord(command.prompts, at)

    def _follow_phase(self, record: StepRecord, transition: Transition) -> None:
        after = transition.after
        if transition.enters_phase and after.phase is Phase.POLICY_UPDATE:
            record.closed, record.learned = transition.at, _learned_tokens(after)
            self._workers = all_engines(after)
            slots = fewest_slots(after)
            self._spec = replace(after.spec, rollout=replace(after.spec.rollout, slots=slots))
        elif transition.enters_phase and transition.before.phase is Phase.POLICY_UPDATE:
            record.updated = transition.at

    def whole_steps(self) -> list[StepRecord]:
        """Return the steps that count: those that ended, without the first."""
        ended = [each for each in self._steps.values() if each.updated > 0.0]
        if len(ended) < 2:
            raise ConfigError("the run has too few steps: a fit needs two that ended")
        return ended[1:]

    def job(self, records: Sequence[StepRecord]) -> Job:
        """Return the run's job on its own workers, with the costs and lengths of some steps."""
        assert self._spec is not None, "a step has ended"
        engine, drafts = self._decoding(records)
        update = self._update(records)
        lengths = tuple(tuple(group) for each in records for group in each.groups)
        inputs = Inputs(lengths=lengths, engine=engine, drafts=drafts, update=update)
        job = Job(
            spec=self._spec,
            inputs=inputs,
            workers=self._workers,
            steps=1,
            speculates=bool(drafts),
        )
        # what no decode step explains: weights and prompts are read, answers written and scored
        late = mean([each.rollout - rollout_seconds(job, each.groups) for each in records])
        update = replace(update, seconds=update.seconds + max(0.0, late))
        return replace(job, inputs=replace(inputs, update=update))

    def _update(self, records: Sequence[StepRecord]) -> UpdateCosts:
        """Fit a line through the seconds of updates, by the tokens that they learned from."""
        average, middle = mean([e.update for e in records]), mean([e.learned for e in records])
        spread = math.fsum((each.learned - middle) ** 2 for each in records)
        product = math.fsum((e.learned - middle) * (e.update - average) for e in records)
        # from no seconds without a token, to all seconds whatever the tokens
        steepest = average / middle if middle else 0.0
        slope = min(max(product / spread, 0.0), steepest) if spread else steepest
        token = self._workers * slope * middle / mean([each.tokens for each in records])
        return UpdateCosts(token=token, seconds=average - slope * middle)

    def _decoding(
        self, records: Sequence[StepRecord]
    ) -> tuple[EngineCosts, tuple[DraftCosts, ...]]:
        """Return what plain steps cost, and what those that were chosen cost and gained."""
        assert self._spec is not None
        chosen = _sum_buckets(each.chosen for each in records)
        if not chosen:
            for each in records:
                # a worker with two engines has rows of both
                if len(each.ended) == self._workers:
                    each.time_plain_steps(self._spec.rollout.chosen_slots)
        plain = _sum_buckets(each.plain for each in records)
        if not plain:
            raise ConfigError("the run has too few decode steps without speculation to time them")
        costs = EngineCosts(
            plain={rows: sums.seconds / sums.steps for rows, sums in plain.items()},
            # reading a token takes no longer than the cheapest row of a decode step
            prefill_token=min(sums.seconds / sums.rows for sums in plain.values()),
        )
        if not chosen:
            return costs, ()
        seconds = {rows: sums.seconds / sums.steps for rows, sums in chosen.items()}
        tokens = {rows: sums.tokens / sums.rows for rows, sums in chosen.items()}
        return costs, (DraftCosts(seconds=seconds, tokens=tokens),)


def _learned_tokens(state: RunState) -> int:
    plan = state.policy.plans.get(state.policy.version)
    return sum(sample.computed for sample in plan.samples) if plan is not None else 0


def _replay(lengths: Sequence[int], slots: int) -> Iterator[tuple[int, int]]:
    """Yield the decode step of each end, and the rows that go on."""
    world = World(1, slots, EngineSpeed(EngineCosts(plain={1: 1.0})))
    world.issue(0, Group(0, lengths).answers)
    world.assign(world.workers[0], 0, slots)
    while world.ended < len(lengths):
        if isinstance(world.next(), Finished):
            yield round(world.now), len(world.workers[0].rows)


def _add(sums: dict[int, DecodeCost], bucket: int, more: DecodeCost) -> None:
    known = sums.get(bucket, DecodeCost())
    sums[bucket] = DecodeCost(
        known.steps + more.steps,
        known.rows + more.rows,
        known.tokens + more.tokens,
        known.seconds + more.seconds,
    )


def _sum_buckets(parts: Iterable[dict[int, DecodeCost]]) -> dict[float, DecodeCost]:
    """Return the sums of buckets with enough steps, by their mean rows."""
    sums: dict[int, DecodeCost] = {}
    for part in parts:
        for bucket, cost in part.items():
            _add(sums, bucket, cost)
    enough = [each for each in sums.values() if each.steps >= _ENOUGH_STEPS and each.seconds > 0]
    return {each.rows / each.steps: each for each in enough}
