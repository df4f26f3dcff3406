"""A journal told in lines: one for each thing that a person following a job wants to know."""

import time
from collections.abc import Sequence

from tlt.human_format import seconds
from tlt.protocol.commands import (
    Command,
    ExplainDrafterDecision,
    FinishRun,
    GiveUpSpeculation,
    IssuePrompts,
    RecordRolloutBatch,
)
from tlt.protocol.events import (
    AnyEvent,
    CheckpointCommitted,
    DrafterDiverged,
    DrafterRefused,
    JobStarted,
    PolicyPublished,
    RolloutDropped,
    RolloutScored,
    SessionResumed,
    SpeculationStopped,
    WorkerFailed,
    WorkerJoined,
    WorkerLost,
)
from tlt.report import EvalSummary, Ledger, StepSummary


class Narrator:
    """Feed it a journal's entries in order."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def tell(self, event: AnyEvent, at: float) -> list[str]:
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        return [f"{clock}  {line}" for line in self.lines(event, self.ledger.add(event, at))]

    def lines(self, event: AnyEvent, commands: Sequence[Command]) -> list[str]:
        """Of an entry that the ledger has been given, and of what was commanded then."""
        return [line for line in (self._event(event), *map(self._command, commands)) if line]

    def _event(self, event: AnyEvent) -> str | None:
        match event:
            case JobStarted():
                count = f"{event.train_prompts} prompts, {event.eval_prompts} held out"
                return f"{event.job} started: {count}, {len(event.workers)} workers"
            case WorkerJoined():
                return f"{event.info.worker} joined (incarnation {event.info.incarnation})"
            case WorkerLost():
                return f"{event.worker} lost (incarnation {event.incarnation}): {event.reason}"
            case DrafterRefused():
                return f"{event.worker} goes without the drafter: {event.error}"
            case DrafterDiverged():
                return f"{event.worker} gives up what it trained: {event.error}"
            case SpeculationStopped():
                return f"{event.worker} decodes without speculation"
            case WorkerFailed():
                return f"{event.worker} cannot run it: {event.error}"
            case SessionResumed():
                return f"the coordinator took over (epoch {event.epoch})"
            case RolloutDropped():
                return f"dropped prompt {event.prompt}.{event.member}: {event.reason}"
            case RolloutScored() if event.error is not None:
                return f"not scored, prompt {event.prompt}.{event.member}: {event.error}"
            case PolicyPublished() if event.metrics is not None:
                return self._update(event)
            case CheckpointCommitted():
                return f"checkpoint of version {event.checkpoint.version}"
            case _:
                return None

    def _update(self, event: PolicyPublished) -> str | None:
        steps = self.ledger.steps
        if not steps or event.metrics is None:
            return None
        metrics = event.metrics
        took = steps[-1].learn_seconds
        return (
            f"step {event.step}: version {event.policy.version}, {metrics.samples} samples, "
            f"gradient {metrics.gradient_norm:.3f}, entropy {metrics.entropy:.3f}, "
            f"kl {metrics.sampling_kl:.1e}" + (f", {seconds(took)}" if took is not None else "")
        )

    def _command(self, command: Command) -> str | None:
        match command:
            case IssuePrompts():
                count = len(command.prompts) * command.members
                what = "evaluation" if command.purpose == "eval" else f"step {command.step}"
                return f"{what}: {count} rollouts issued"
            case RecordRolloutBatch(purpose="eval"):
                return _eval(self.ledger.evals[-1])
            case RecordRolloutBatch():
                return _round(self.ledger.steps[-1])
            case GiveUpSpeculation():
                return (
                    f"speculation is off from here on: it saved {command.saved:.1f} s, "
                    f"between {command.low:.1f} and {command.high:.1f}"
                )
            case ExplainDrafterDecision():
                return decision(command.what, command.saved, command.cost, command.why)
            case FinishRun():
                return f"{command.status}" + (f": {command.error}" if command.error else "")
            case _:
                return None


_DECISIONS = {
    "train": "drafter: idle workers train it",
    "rest": "drafter: training would not pay now",
    "buy": "drafter: all workers train it for a while",
    "adopt": "drafter: a better one is used from now on",
    "reject": "drafter: the new one is not better",
    "return": "drafter: back to the one in use",
}


def decision(what: str, saved: float, cost: float, why: str) -> str:
    sums = f"; saves {saved:.1f} s, costs {cost:.1f} s, as predicted" if saved or cost else ""
    return f"{_DECISIONS[what]}: {why}{sums}"


def _eval(done: EvalSummary) -> str:
    return f"evaluation of version {done.version}: {accuracy(done)}, {seconds(done.seconds)}"


def accuracy(done: EvalSummary) -> str:
    return f"{done.mean:.3f} ± {done.stderr:.3f} on {done.problems} problems"


def _round(step: StepSummary) -> str:
    length = step.length
    return (
        f"step {step.step}: reward {step.reward:.3f}, length p50 {length.p50} p90 {length.p90} "
        f"max {length.max}, {step.tokens} tokens, {seconds(step.rollout_seconds)}"
        + (f", {step.dropped} dropped" if step.dropped else "")
        + (f", {step.unscored} not scored" if step.unscored else "")
    )
