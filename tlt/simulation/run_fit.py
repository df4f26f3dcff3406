"""Fit a simulated job to the journal of a run.

A run that speculates reports its decode steps. In others they are timed by a replay: between two
ends of a worker's answers its rows stay the same. The first step is left out, because ranks load
and compile in it.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise
from statistics import linear_regression
from typing import NamedTuple

from msgspec.structs import replace

from tlt.base.id_types import Member, PromptIndex, WorkerId
from tlt.base.strategies import Off
from tlt.errors import ConfigError
from tlt.policies.run.chosen_sizes import fewest_slots
from tlt.policies.run.run_state import Phase, RunState, all_engines
from tlt.policies.speculation.strategy_policy import bucket_of
from tlt.protocol.commands import IssuePrompts
from tlt.protocol.events import AnyEvent, DecodingReported, RolloutFinished
from tlt.report import Transition
from tlt.report.statistics import mean
from tlt.simulation.answer_groups import Group
from tlt.simulation.engine_speed import EngineSpeed
from tlt.simulation.inputs import Curve, DraftCosts, EngineCosts, Inputs, UpdateCosts
from tlt.simulation.job import Job, Mode, rollout_seconds
from tlt.simulation.world import Finished, World

# decode steps of a bucket from which on their mean is believed
_ENOUGH_STEPS = 8
# the purpose of the prompts that open a step, and the group that they replace
_OPENS = ("train", None)


# an answer: the place of its group in the queue, its number in it, tokens, and when it ended
_Ended = tuple[int, Member, int, float]


class _Steps(NamedTuple):
    """Decode steps with about as many rows; the bucket of a sum means nothing."""

    bucket: float
    steps: float
    rows: float
    tokens: float
    seconds: float


@dataclass
class StepRecord:
    """One step of a run: its seconds, answers and decode steps."""

    # the places of the prompts in the queue
    prompts: dict[PromptIndex, int]
    opened: float
    # seconds of its rollout, and of its update
    rollout: float = 0.0
    update: float = 0.0
    # tokens that its update learned from
    learned: int = 0
    ended: dict[WorkerId, list[_Ended]] = field(default_factory=lambda: defaultdict(list))
    # without speculation, and those that a speculating job chose
    plain: list[_Steps] = field(default_factory=list)
    chosen: list[_Steps] = field(default_factory=list)

    @property
    def groups(self) -> list[list[int]]:
        """Return the lengths of each group's answers, in the order of the queue."""
        groups: dict[int, list[int]] = defaultdict(list)
        for each in sorted(chain(*self.ended.values())):
            groups[each[0]].append(each[2])
        return list(groups.values())

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.groups))

    def add(self, event: AnyEvent, at: float) -> None:
        match event:
            case RolloutFinished() if event.prompt in self.prompts:
                ended = self.prompts[event.prompt], event.member, event.length, at
                self.ended[event.worker].append(ended)
            case DecodingReported():
                for each in event.tallies:
                    found = _Steps(each.bucket, each.steps, each.rows, each.tokens, each.seconds)
                    self.plain += [found] if each.strategy == Off() else []
                    self.chosen += [found] if each.control is None else []
            case _:
                pass

    def time_plain_steps(self, slots: int) -> Iterator[_Steps]:
        """Time the steps of a step that reported none."""
        for own in self.ended.values():
            times = sorted(each[3] for each in own)
            ends = list(_replay([each[2] for each in sorted(own)], slots))
            for (before, after), ((first, rows), (second, _)) in zip(
                pairwise(times), pairwise(ends), strict=True
            ):
                steps, tokens = second - first, (second - first) * rows
                yield _Steps(bucket_of(rows), steps, tokens, tokens, after - before)


class RunFit:
    """Collects a run's steps from its journal."""

    def __init__(self) -> None:
        self._steps: list[StepRecord] = []
        # when a rollout batch was last complete
        self._state: RunState | None = None

    def add(self, transition: Transition) -> None:
        if self._steps:
            self._follow(self._steps[-1], transition)
        for command in transition.commands:
            # prompts in place of others are left out
            if isinstance(command, IssuePrompts) and (command.purpose, command.replaces) == _OPENS:
                places = {prompt: place for place, prompt in enumerate(command.prompts)}
                self._steps.append(StepRecord(places, transition.at))

    def _follow(self, record: StepRecord, transition: Transition) -> None:
        event, after, at = transition.event, transition.after, transition.at
        if transition.counts and getattr(event, "purpose", None) == "train":
            record.add(event, at)
        if transition.enters_phase and after.phase is Phase.POLICY_UPDATE:
            record.rollout, record.learned = at - record.opened, _learned_tokens(after)
            self._state = after
        elif transition.enters_phase and transition.before.phase is Phase.POLICY_UPDATE:
            record.update = at - record.opened - record.rollout

    def whole_steps(self) -> list[StepRecord]:
        """Return the steps that count: those that ended, without the first."""
        ended = [each for each in self._steps if each.update > 0.0]
        if len(ended) < 2:
            raise ConfigError("the run has too few steps: a fit needs two that ended")
        return ended[1:]

    def job(self, records: Sequence[StepRecord]) -> Job:
        """Return the run's job on its own workers, with the costs and lengths of some steps."""
        state = self._state
        assert state is not None, "a step has ended"
        rollout, workers = state.spec.rollout, all_engines(state)
        if rollout.surplus(1):
            complaint = "a fit needs steps that wait for all answers, and the run's don't"
            raise ConfigError(f"{complaint}: it had rollout.partial or rollout.defer_long")
        slots = fewest_slots(state)
        engine, drafts = _decoding(records, workers, slots)
        update = _update(records, workers)
        lengths = tuple(tuple(group) for each in records for group in each.groups)
        job = Job(
            spec=replace(state.spec, rollout=replace(rollout, slots=slots)),
            inputs=Inputs(lengths=lengths, engine=engine, drafts=drafts, update=update),
            workers=workers,
            steps=1,
            mode=Mode(speculates=bool(drafts)),
        )
        # what no decode step explains: weights and prompts are read, answers written and scored
        late = mean([each.rollout - rollout_seconds(job, each.groups) for each in records])
        update = replace(update, seconds=update.seconds + max(0.0, late))
        return replace(job, inputs=replace(job.inputs, update=update))


def _update(records: Sequence[StepRecord], workers: int) -> UpdateCosts:
    """Fit a line through the seconds of updates, by the tokens that they learned from."""
    learned, seconds = [each.learned for each in records], [each.update for each in records]
    # from no seconds without a token, to all seconds whatever the tokens
    slope = mean(seconds) / mean(learned) if any(learned) else 0.0
    if len(set(learned)) > 1:
        slope = min(max(linear_regression(learned, seconds).slope, 0.0), slope)
    constant = mean(seconds) - slope * mean(learned)
    tokens = mean([each.tokens for each in records])
    return UpdateCosts(token=workers * slope * mean(learned) / tokens, seconds=constant)


def _decoding(
    records: Sequence[StepRecord], workers: int, slots: int
) -> tuple[EngineCosts, tuple[DraftCosts, ...]]:
    """Return what plain steps cost, and what those that were chosen cost and gained."""
    plain = _sum_buckets(steps for each in records for steps in each.plain)
    chosen = _sum_buckets(steps for each in records for steps in each.chosen)
    if not chosen:
        # a worker with two engines has rows of both
        alone = [each for each in records if len(each.ended) == workers]
        plain = _sum_buckets(steps for each in alone for steps in each.time_plain_steps(slots))
    if not plain:
        raise ConfigError("the run has too few decode steps without speculation to time them")
    costs = EngineCosts(
        plain=_seconds(plain),
        # reading a token takes no longer than the cheapest row of a decode step
        prefill_token=min(each.seconds / each.rows for each in plain),
    )
    tokens = {each.rows / each.steps: each.tokens / each.rows for each in chosen}
    return costs, (DraftCosts(seconds=_seconds(chosen), tokens=tokens),) if chosen else ()


def _learned_tokens(state: RunState) -> int:
    plan = state.policy.plans.get(state.policy.version)
    return sum(sample.computed for sample in plan.samples) if plan is not None else 0


def _replay(lengths: Sequence[int], slots: int) -> Iterator[tuple[int, int]]:
    """Yield the decode step of each end, and the rows that go on."""
    world = World(1, slots, EngineSpeed(EngineCosts(plain={1: 1.0})))
    (worker,) = world.workers
    world.assign(worker, deque(Group(0, lengths).answers), slots)
    while world.ended < len(lengths):
        if isinstance(world.next(), Finished):
            yield round(world.now), len(worker.rows)


def _seconds(sums: Iterable[_Steps]) -> Curve:
    return {each.rows / each.steps: each.seconds / each.steps for each in sums}


def _sum_buckets(found: Iterable[_Steps]) -> list[_Steps]:
    """Return the sums of buckets with enough steps."""
    buckets = groupby(sorted(found), key=lambda each: each.bucket)
    sums = [_Steps(*map(math.fsum, zip(*parts, strict=True))) for _, parts in buckets]
    return [each for each in sums if each.steps >= _ENOUGH_STEPS and each.seconds > 0]
