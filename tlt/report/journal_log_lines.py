"""Describe a journal in log lines, one for each thing that a person following a job should know."""

from tlt.base.human_format import seconds
from tlt.protocol.commands import (
    Command,
    ContinueJob,
    EndJob,
    ExplainDrafterDecision,
    GiveUpSpeculation,
    IssuePrompts,
    PauseJob,
    RecordRolloutBatch,
    ResumeSpeculation,
    StartJob,
    SuspendJob,
)
from tlt.protocol.events import (
    AnyEvent,
    CheckpointCommitted,
    DrafterDiverged,
    DrafterRefused,
    PolicyPublished,
    RolloutDropped,
    RolloutScored,
    SessionResumed,
    SizesChosen,
    WorkerFailed,
    WorkerJoined,
    WorkerLost,
)
from tlt.report.drafter_training import Decision
from tlt.report.ledger import Ledger
from tlt.report.ledger_figure_types import StepSummary
from tlt.report.transition import Transition

_DECISIONS = {
    "train": "drafter: idle workers train it",
    "wait": "drafter: it is not trained now",
    "adopt": "drafter: the new version is better and is used from now on",
    "reject": "drafter: the new version is not better",
    "restart": "drafter: training restarts from the drafter in use",
}


def log_lines(ledger: Ledger, transition: Transition) -> list[str]:
    """Describe the transition that the ledger has just made."""
    lines = [_event_line(ledger, transition.event)]
    lines += [_command_line(ledger, command) for command in transition.commands]
    return [line for line in lines if line is not None]


def describe_decision(decision: Decision | ExplainDrafterDecision) -> str:
    return f"{_DECISIONS[decision.kind]}: {decision.why}"


def _event_line(ledger: Ledger, event: AnyEvent) -> str | None:
    match event:
        case StartJob():
            return _start_line(event)
        case WorkerJoined():
            return f"{event.info.worker} joined (incarnation {event.info.incarnation})"
        case SizesChosen(rank=0):
            return f"{event.worker}: {event.why}"
        case WorkerLost():
            return f"{event.worker} lost (incarnation {event.incarnation}): {event.reason}"
        case DrafterRefused():
            return f"{event.worker} decodes without the drafter: {event.error}"
        case DrafterDiverged():
            return f"{event.worker} discards its drafter training: {event.error}"
        case WorkerFailed():
            return f"{event.worker} cannot run the job: {event.error}"
        case PauseJob():
            return "pausing: the workers are given back"
        case ContinueJob():
            return f"goes on after a pause, on {len(event.workers)} workers"
        case SessionResumed():
            return f"the coordinator took over (epoch {event.epoch})"
        case RolloutDropped():
            return f"dropped prompt {event.prompt}.{event.member}: {event.reason}"
        case RolloutScored() if event.error is not None:
            return f"not scored, prompt {event.prompt}.{event.member}: {event.error}"
        case PolicyPublished():
            return _update_line(ledger, event)
        case CheckpointCommitted():
            return f"checkpoint of version {event.checkpoint.version}"
        case _:
            return None


def _start_line(event: StartJob) -> str:
    found = event.prepared
    count = f"{found.train_prompts} prompts{_sources(event)}, {found.eval_prompts} held out"
    if len(found.eval_sets) > 1:
        sets = (f"{each.prompts} of {each.name}" for each in found.eval_sets)
        count += f" ({', '.join(sets)})"
    if found.skipped_prompts:
        count += f", {found.skipped_prompts} left out as too long"
    if found.hub_policy is not None:
        count += f", {found.hub_policy.name}"
    origin = "" if event.starts_from is None else f" from {event.starts_from.name}"
    started = f"{event.job} started{origin}: {count}, {len(event.workers)} workers"
    return f"{started}; no speculation: {found.no_speculation}" if found.no_speculation else started


def _sources(event: StartJob) -> str:
    """Return the prompts of each source of a mixture."""
    labels, counts = (s.label for s in event.spec.data.sources), event.prepared.train_sources
    parts = [f"{label} {count}" for label, count in zip(labels, counts, strict=False)]
    return f" ({', '.join(parts)})" if parts else ""


def _update_line(ledger: Ledger, event: PolicyPublished) -> str | None:
    metrics = event.metrics
    if not ledger.steps or metrics is None:
        return None
    update_seconds = ledger.steps[-1].update_seconds
    return (
        f"step {event.step}: version {event.policy.version}, {metrics.samples} samples, "
        f"gradient {metrics.gradient_norm:.3f}, entropy {metrics.entropy:.3f}, "
        f"kl {metrics.sampling_kl:.1e}"
        + (f", {metrics.skipped_steps} steps skipped" if metrics.skipped_steps else "")
        + (f", {seconds(update_seconds)}" if update_seconds is not None else "")
    )


def _command_line(ledger: Ledger, command: Command) -> str | None:
    match command:
        case IssuePrompts(replaces=None):
            count = sum(command.counts)
            batch = "evaluation" if command.purpose == "eval" else f"step {command.step}"
            return f"{batch}: {count} rollouts issued"
        case RecordRolloutBatch(purpose="eval"):
            done = ledger.evals[-1]
            gain = "" if done.gain is None else f"{done.gain.describe()} against the first one"
            parts = [done.describe_score(), seconds(done.seconds), done.describe_sets(), gain]
            text = "; ".join(part for part in parts if part)
            return f"evaluation of version {done.version}: {text}"
        case RecordRolloutBatch():
            return _rollout_line(ledger.steps[-1])
        case GiveUpSpeculation():
            return (
                f"speculation is off for {command.batches} rollout batches: "
                f"it saved {command.savings:.1f} s (95 %: {command.low:.1f} to {command.high:.1f})"
            )
        case ResumeSpeculation():
            return "speculation is tried again"
        case ExplainDrafterDecision():
            return describe_decision(command)
        case SuspendJob():
            return "paused"
        case EndJob():
            return f"{command.status}" + (f": {command.error}" if command.error else "")
        case _:
            return None


def _rollout_line(step: StepSummary) -> str:
    length = step.length
    by_source = ", ".join(f"{name} {mean:.3f}" for name, mean in step.reward_sources.items())
    return (
        f"step {step.step}: reward {step.reward:.3f}"
        + (f" ({by_source})" if by_source else "")
        + f", length p50 {length.p50} p90 {length.p90} "
        f"max {length.max}, {step.tokens} tokens, {seconds(step.rollout_seconds)}"
        + (f", {step.dropped} dropped" if step.dropped else "")
        + (f", {step.unscored} not scored" if step.unscored else "")
        + (
            f", {step.replaced_groups} groups replaced ({100 * step.extra_share:.0f} % of decoding)"
            if step.replaced_groups
            else ""
        )
        + (f", {step.waiting_groups} groups wait" if step.waiting_groups else "")
    )
