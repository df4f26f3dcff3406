"""What training the drafter took and gave: idle seconds that were used, and what for."""

import msgspec

from tlt.ids import DrafterVersion, Step
from tlt.policies.job.run_state import Duty, Phase, RunState
from tlt.protocol.commands import Command, ExplainDrafterDecision
from tlt.protocol.events import (
    AnyEvent,
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterRefused,
    DrafterTrainingStopped,
)
from tlt.protocol.records import TokensByOrigin
from tlt.report.statistics import quantile


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter that was made, and what its canary said."""

    version: DrafterVersion
    step: Step
    micro_batches: int
    # accept lengths of the one in use before, and of this one
    used: float | None
    trained: float
    adopted: bool


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    what: str
    # seconds of the job's, predicted
    saved: float
    cost: float
    why: str


class Drafting(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds are those of devices: a worker of two ranks that idles for one has two."""

    # all slots empty and nothing left to pull: spent with the drafter, and left alone
    idle_used: float
    idle_left: float
    # not idle, and bought for the drafter
    bought: float
    # of micro-batches that were kept: in idle seconds, and in bought ones
    harvested: float
    harvested_bought: float
    # in reading what was written elsewhere, in handing in, in merging and measuring, and in
    # micro-batches that were dropped
    reading: float
    publishing: float
    merging: float
    dropped: float
    micro_batches: int
    typical_seconds: float
    # the longest one of a handing in: 95 % of them are no longer than this
    longest_p95: float
    tokens: TokensByOrigin
    # until a worker that was told to stop had stopped: seconds, and micro-batches
    preempted: int
    preempt_p50: float
    preempt_p99: float
    preempt_p99_micro_batches: float
    measured: tuple[Measured, ...]
    decisions: tuple[Decision, ...]
    # by whom and why: what was trained, and undone
    spoiled: tuple[str, ...]
    # by whom and why: drafters that a worker could not read, or that do not fit
    refused: tuple[str, ...]

    @property
    def idle(self) -> float:
        return self.idle_used + self.idle_left


class Drafted:
    def __init__(self) -> None:
        self._idle_used = self._idle_left = self._bought = 0.0
        self._harvested = {True: 0.0, False: 0.0}
        self._reading = self._publishing = self._merging = self._dropped = 0.0
        self._micro_batches = 0
        self._typical = 0.0
        self._longest: list[float] = []
        self._tokens = TokensByOrigin()
        self._latencies: list[tuple[float, float]] = []
        self._measured: list[Measured] = []
        self._decisions: list[Decision] = []
        self._spoiled: list[str] = []
        # each once, in the order in which they came
        self._refused: dict[str, None] = {}

    def pass_time(self, state: RunState, passed: float) -> None:
        for worker in state.workers.values():
            trains = worker.duty in (Duty.DRAFTER_TRAINING, Duty.STOPPING)
            spent = passed * worker.info.ranks
            if state.phase is Phase.RESERVED_TRAINING:
                self._bought += spent
            elif trains:
                self._idle_used += spent
            elif worker.duty is Duty.IDLE and state.phase in (Phase.ROLLOUT, Phase.EVALUATING):
                self._idle_left += spent

    def watch(self, before: RunState, event: AnyEvent, after: RunState) -> None:
        """Only what changed something counts."""
        match event:
            case DrafterDeltaReady() if after.drafter is not before.drafter:
                bought = before.phase is Phase.RESERVED_TRAINING
                self._learned(
                    event, bought, void=event.delta.base < after.drafter.lineage.base.root
                )
            case DrafterTrainingStopped() if after.workers is not before.workers:
                self._dropped += event.dropped_seconds
                if before.workers[event.worker].duty is Duty.STOPPING:
                    self._latencies.append((event.seconds, event.typical_seconds))
            case DrafterMerged() if after.drafter is not before.drafter:
                self._trained(event, after)
            case DrafterDiverged() if after.drafter is not before.drafter:
                self._spoiled.append(f"{event.worker}: {event.error}")
            case DrafterRefused():
                self._refused[f"{event.worker}: {event.error}"] = None
            case _:
                pass

    def note(self, state: RunState, command: Command) -> None:
        if isinstance(command, ExplainDrafterDecision):
            self._decisions.append(
                Decision(
                    step=state.step,
                    what=command.what,
                    saved=command.saved,
                    cost=command.cost,
                    why=command.why,
                )
            )

    def account(self) -> Drafting | None:
        """None where no drafter was trained, spoiled or refused."""
        if not (self._decisions or self._micro_batches or self._spoiled or self._refused):
            return None
        latencies = sorted(seconds for seconds, _ in self._latencies)
        in_batches = sorted(seconds / max(t, 1e-9) for seconds, t in self._latencies if t > 0)
        return Drafting(
            idle_used=self._idle_used,
            idle_left=self._idle_left,
            bought=self._bought,
            harvested=self._harvested[False],
            harvested_bought=self._harvested[True],
            reading=self._reading,
            publishing=self._publishing,
            merging=self._merging,
            dropped=self._dropped,
            micro_batches=self._micro_batches,
            typical_seconds=self._typical,
            longest_p95=quantile(sorted(self._longest), 0.95),
            tokens=self._tokens,
            preempted=len(latencies),
            preempt_p50=quantile(latencies, 0.5),
            preempt_p99=quantile(latencies, 0.99),
            preempt_p99_micro_batches=quantile(in_batches, 0.99),
            measured=tuple(self._measured),
            decisions=tuple(self._decisions),
            spoiled=tuple(self._spoiled),
            refused=tuple(self._refused),
        )

    def _learned(self, event: DrafterDeltaReady, bought: bool, void: bool) -> None:
        """`void`: what it was learned on had been given up by then."""
        if void:
            self._dropped += event.seconds
        else:
            self._harvested[bought] += event.seconds
        self._reading += event.reading_seconds
        self._publishing += event.publishing_seconds
        self._micro_batches += event.updates
        self._typical = event.typical_seconds
        self._longest.append(event.longest_seconds)
        seen, new = self._tokens, event.tokens
        self._tokens = TokensByOrigin(
            own=seen.own + new.own,
            others=seen.others + new.others,
            running=seen.running + new.running,
            previous=seen.previous + new.previous,
        )

    def _trained(self, event: DrafterMerged, after: RunState) -> None:
        self._merging += event.seconds
        if event.evaluation.answers == 0:
            return
        self._measured.append(
            Measured(
                version=event.drafter.version,
                step=after.step,
                micro_batches=event.base.micro_batches,
                used=event.evaluation.used,
                trained=event.evaluation.trained,
                adopted=after.drafter.adoption.used == event.drafter,
            )
        )
