"""Costs and results of drafter training: device seconds, micro-batches, evaluations, decisions."""

import msgspec

from tlt.base.id_types import DrafterVersion, Step
from tlt.policies.run.run_state import Duty, Phase, RunState, count_engines
from tlt.protocol.commands import Command, ExplainDrafterDecision
from tlt.protocol.events import (
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterRefused,
    DrafterTrainingStopped,
)
from tlt.protocol.shared_values import TokensByOrigin
from tlt.report.statistics import quantile
from tlt.report.transition import Transition


class EvaluatedDrafter(msgspec.Struct, frozen=True, kw_only=True):
    """A merged drafter and its accept length on held-out answers."""

    version: DrafterVersion
    step: Step
    micro_batches: int
    # accept length of the drafter in use before
    accept_length_before: float | None
    accept_length: float
    adopted: bool


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    kind: str
    why: str


class DrafterTraining(msgspec.Struct, kw_only=True):
    """Seconds are those of devices: a worker of two ranks that idles for one second has two."""

    # without running rows and prompts: spent on drafter training, and unused
    idle_used: float = 0.0
    idle_left: float = 0.0
    # spent on micro-batches that were kept
    idle_kept: float = 0.0
    # spent on reading other workers' answers, on publishing deltas, on merging and evaluating, and
    # on micro-batches that were dropped
    reading_seconds: float = 0.0
    publishing_seconds: float = 0.0
    merging_seconds: float = 0.0
    dropped_seconds: float = 0.0
    micro_batches: int = 0
    # duration of a micro-batch: the last reported median, and the 95 % quantile of the longest ones
    median_seconds: float = 0.0
    longest_p95: float = 0.0
    tokens: TokensByOrigin = TokensByOrigin()
    # from the command to stop until the worker had stopped: seconds, and micro-batches
    stops: int = 0
    stop_p50: float = 0.0
    stop_p99: float = 0.0
    stop_p99_micro_batches: float = 0.0
    evaluations: tuple[EvaluatedDrafter, ...] = ()
    decisions: tuple[Decision, ...] = ()
    # "WORKER: ERROR" of training that was discarded, and of drafters that could not be used
    divergences: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()

    @property
    def idle(self) -> float:
        return self.idle_used + self.idle_left


class DrafterTrainingFold:
    def __init__(self) -> None:
        self._sums = DrafterTraining()
        # loss summed over the micro-batches
        self.total_loss = 0.0
        self._longest: list[float] = []
        self._stops: list[float] = []
        # in micro-batches
        self._relative_stops: list[float] = []
        self._evaluations: list[EvaluatedDrafter] = []
        self._decisions: list[Decision] = []
        self._diverged: list[str] = []
        # an ordered set
        self._refused: dict[str, None] = {}

    def pass_time(self, state: RunState, passed: float) -> None:
        sums = self._sums
        for worker in state.workers.values():
            spent = passed * worker.info.ranks
            if worker.duty in (Duty.DRAFTER_TRAINING, Duty.STOPPING):
                # ranks without an engine don't train
                used = passed * count_engines(state, [worker])
                sums.idle_used += used
                sums.idle_left += spent - used
            elif worker.duty is Duty.IDLE and state.phase in (Phase.ROLLOUT, Phase.EVALUATING):
                sums.idle_left += spent

    def add(self, transition: Transition) -> None:
        for command in transition.commands:
            self._add_command(transition.after.step, command)
        if not transition.counts:
            return
        before, after = transition.before, transition.after
        match event := transition.event:
            case DrafterDeltaReady():
                is_void = event.delta.base < after.drafter.lineage.base.root
                self._add_delta(event, is_void)
            case DrafterTrainingStopped():
                self._sums.dropped_seconds += event.dropped_seconds
                if before.workers[event.worker].duty is Duty.STOPPING:
                    self._stops.append(event.seconds)
                    if event.median_seconds > 0:
                        ratio = event.seconds / max(event.median_seconds, 1e-9)
                        self._relative_stops.append(ratio)
            case DrafterMerged():
                self._sums.merging_seconds += event.seconds
                if event.evaluation.answers:
                    self._add_evaluation(event, after)
            case DrafterDiverged():
                self._diverged.append(f"{event.worker}: {event.error}")
            case DrafterRefused():
                self._refused[f"{event.worker}: {event.error}"] = None
            case _:
                pass

    def summary(self) -> DrafterTraining | None:
        """Return None if no drafter was trained, discarded or refused."""
        micro_batches = self._sums.micro_batches
        if not (self._decisions or micro_batches or self._diverged or self._refused):
            return None
        stops = sorted(self._stops)
        return msgspec.structs.replace(
            self._sums,
            longest_p95=quantile(sorted(self._longest), 0.95),
            stops=len(stops),
            stop_p50=quantile(stops, 0.5),
            stop_p99=quantile(stops, 0.99),
            stop_p99_micro_batches=quantile(sorted(self._relative_stops), 0.99),
            evaluations=tuple(self._evaluations),
            decisions=tuple(self._decisions),
            divergences=tuple(self._diverged),
            refusals=tuple(self._refused),
        )

    def _add_command(self, step: Step, command: Command) -> None:
        if isinstance(command, ExplainDrafterDecision):
            self._decisions.append(Decision(step=step, kind=command.kind, why=command.why))

    def _add_delta(self, event: DrafterDeltaReady, is_void: bool) -> None:
        """Add a delta; one is void if its base was given up before it was ready."""
        sums = self._sums
        if is_void:
            sums.dropped_seconds += event.seconds
        else:
            sums.idle_kept += event.seconds
        sums.reading_seconds += event.reading_seconds
        sums.publishing_seconds += event.publishing_seconds
        sums.micro_batches += event.updates
        sums.median_seconds = event.median_seconds
        self.total_loss += event.updates * event.loss
        self._longest.append(event.longest_seconds)
        total, new = sums.tokens, event.tokens
        sums.tokens = TokensByOrigin(
            own=total.own + new.own,
            others=total.others + new.others,
            unfinished=total.unfinished + new.unfinished,
            earlier=total.earlier + new.earlier,
        )

    def _add_evaluation(self, event: DrafterMerged, after: RunState) -> None:
        self._evaluations.append(
            EvaluatedDrafter(
                version=event.drafter.version,
                step=after.step,
                micro_batches=event.base.micro_batches,
                accept_length_before=event.evaluation.accept_length_before,
                accept_length=event.evaluation.accept_length,
                adopted=after.drafter.adoption.used == event.drafter,
            )
        )
