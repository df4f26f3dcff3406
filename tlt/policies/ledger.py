"""What a run was like, folded from its journal: dashboard, CLI and benchmarks read the same sums.

The fold drives `decide` over the journal's events and watches the state: seconds by duty and by
phase are what the coordinator itself believed.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import cast

import msgspec

from tlt.config import JobSpec
from tlt.messages import (
    AnyEvent,
    BlobRef,
    Command,
    FinishRun,
    IssuePrompts,
    JobStarted,
    KeepBest,
    PolicyPublished,
    RecordRound,
    RolloutDropped,
    RolloutFinished,
    RolloutScored,
    RunEvent,
    UpdateMetrics,
)
from tlt.policies import coordinator
from tlt.policies.run_state import Phase, RunState
from tlt.types import JobId, JobStatus, PolicyVersion, Step, WorkerId


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    mean: float = 0.0
    p50: int = 0
    p90: int = 0
    max: int = 0


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    reward: float
    rollouts: int
    dropped: int
    # reward errors that were scored with the fallback
    unscored: int
    tokens: int
    length: Spread
    # the share of answers that ran out of room
    clipped: float
    rollout_seconds: float
    learn_seconds: float | None = None
    metrics: UpdateMetrics | None = None


class EvalSummary(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    version: PolicyVersion
    mean: float
    stderr: float
    problems: int
    length: Spread
    seconds: float


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A policy whose weights lie in the run's folder."""

    version: PolicyVersion
    weights: BlobRef


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    job: JobId | None
    status: JobStatus
    error: str | None
    phase: Phase
    step: Step
    steps_planned: int
    version: PolicyVersion
    # of the round in hand
    settled: int
    expected: int
    seconds: float
    phases: dict[str, float]
    workers: dict[WorkerId, dict[str, float]]
    losses: int
    steps: tuple[StepSummary, ...]
    evals: tuple[EvalSummary, ...]
    last: Kept | None
    best: Kept | None


class _Open:
    """Sums over the answers of the round in hand."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.lengths: list[int] = []
        self.clipped = 0
        self.dropped = 0
        self.unscored = 0

    def add(self, event: AnyEvent) -> None:
        match event:
            case RolloutFinished():
                self.lengths.append(event.length)
                self.clipped += event.stop == "length"
            case RolloutDropped():
                self.dropped += 1
            case RolloutScored():
                self.unscored += event.error is not None
            case _:
                pass


class Ledger:
    def __init__(self, job: JobId, spec: JobSpec) -> None:
        self.spec = spec
        self._state = coordinator.new_run(job, spec)
        self._began: float | None = None
        self._now = 0.0
        self._status: JobStatus = "running"
        self._error: str | None = None
        self._phases: defaultdict[str, float] = defaultdict(float)
        self._workers: dict[WorkerId, defaultdict[str, float]] = {}
        self._round = _Open(0.0)
        self._learn_began = 0.0
        self._steps: list[StepSummary] = []
        self._evals: list[EvalSummary] = []
        self._best: Kept | None = None

    @property
    def ended(self) -> bool:
        return self._state.phase is Phase.ENDED

    def add(self, event: AnyEvent, at: float) -> list[Command]:
        """The journal's next entry; returns what was commanded."""
        before = self._state
        if isinstance(event, JobStarted):
            self._began = self._now = at
        self._pass_time(before, at)
        # The journal holds nothing but what this job's `decide` consumed.
        self._state, commands = coordinator.decide(before, cast("RunEvent", event), at)
        if self._state.round is not before.round:
            self._round.add(event)
        for command in commands:
            self._note(command)
        if isinstance(event, PolicyPublished) and self._state.version > before.version:
            self._learned(event)
        return list(commands)

    def snapshot(self) -> Snapshot:
        state = self._state
        expected = unsettled = 0
        if state.round is not None:
            expected = sum(len(group.members) for group in state.round.groups.values())
            unsettled = state.round.unsettled
        saved = state.checkpoint
        return Snapshot(
            job=state.job,
            status=self._status,
            error=self._error,
            phase=state.phase,
            step=state.step,
            steps_planned=state.spec.algorithm.steps,
            version=state.version,
            settled=expected - unsettled,
            expected=expected,
            seconds=0.0 if self._began is None else self._now - self._began,
            phases=dict(self._phases),
            workers={worker: dict(duties) for worker, duties in self._workers.items()},
            losses=state.losses,
            steps=tuple(self._steps),
            evals=tuple(self._evals),
            last=None if saved is None else Kept(version=saved.version, weights=saved.weights),
            best=self._best,
        )

    def _pass_time(self, state: RunState, at: float) -> None:
        passed = max(0.0, at - self._now)
        self._now = max(self._now, at)
        if state.phase in (Phase.STARTING, Phase.ENDED):
            return
        self._phases[state.phase.value] += passed
        for worker, known in state.workers.items():
            duties = self._workers.setdefault(worker, defaultdict(float))
            duties[known.duty.value] += passed

    def _note(self, command: Command) -> None:
        match command:
            case IssuePrompts():
                self._round = _Open(self._now)
            case RecordRound(purpose="eval"):
                self._evals.append(self._eval(command))
            case RecordRound():
                self._steps.append(self._step(command))
                self._learn_began = self._now
            case KeepBest() if command.policy.weights is not None:
                self._best = Kept(version=command.policy.version, weights=command.policy.weights)
            case FinishRun():
                self._status, self._error = command.status, command.error
            case _:
                pass

    def _eval(self, closed: RecordRound) -> EvalSummary:
        rewards = closed.rewards
        return EvalSummary(
            step=closed.step,
            version=closed.version,
            mean=_mean(rewards),
            stderr=_stderr(rewards),
            problems=len(rewards),
            length=spread(self._round.lengths),
            seconds=self._now - self._round.began,
        )

    def _step(self, closed: RecordRound) -> StepSummary:
        sums = self._round
        return StepSummary(
            step=closed.step,
            reward=_mean(closed.rewards),
            rollouts=len(closed.rewards),
            dropped=sums.dropped,
            unscored=sums.unscored,
            tokens=sum(sums.lengths),
            length=spread(sums.lengths),
            clipped=sums.clipped / max(1, len(sums.lengths)),
            rollout_seconds=self._now - sums.began,
        )

    def _learned(self, event: PolicyPublished) -> None:
        self._steps[-1] = msgspec.structs.replace(
            self._steps[-1],
            learn_seconds=self._now - self._learn_began,
            metrics=event.metrics,
        )


def spread(lengths: Sequence[int]) -> Spread:
    if not lengths:
        return Spread()
    ordered = sorted(lengths)
    return Spread(
        mean=sum(ordered) / len(ordered),
        p50=ordered[len(ordered) // 2],
        p90=ordered[int(0.9 * (len(ordered) - 1))],
        max=ordered[-1],
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _stderr(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))
