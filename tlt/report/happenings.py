"""Happenings to mark on a timeline: lost workers, new policies and drafters, decisions."""

from collections.abc import Iterator

import msgspec

from tlt.base.id_types import NAMED, DrafterVersion, WorkerId
from tlt.protocol.commands import (
    AdoptDrafter,
    Command,
    ContinueJob,
    ExplainDrafterDecision,
    GiveUpSpeculation,
    IssuePrompts,
    ResumeSpeculation,
)
from tlt.protocol.events import (
    CheckpointCommitted,
    PolicyPublished,
    SessionResumed,
    WorkerFailed,
    WorkerJoined,
    WorkerLost,
)
from tlt.report.journal_log_lines import describe_decision
from tlt.report.transition import Transition


class Happening(msgspec.Struct, frozen=True):
    kind: str
    text: str
    # None: it concerns the whole job
    worker: WorkerId | None = None


class Happenings:
    """Feed it a run's transitions in order."""

    def __init__(self) -> None:
        self._drafter: DrafterVersion | None = None

    def of(self, transition: Transition) -> Iterator[Happening]:
        if transition.counts:
            yield from self._event(transition)
        for command in transition.commands:
            yield from self._command(command)

    def _event(self, transition: Transition) -> Iterator[Happening]:
        match event := transition.event:
            case WorkerLost():
                yield Happening("lost", f"lost: {event.reason}", event.worker)
            case WorkerJoined():
                yield Happening("joined", "joined", event.info.worker)
            case WorkerFailed():
                yield Happening("failed", f"cannot run the job: {event.error}", event.worker)
            case PolicyPublished():
                yield Happening("policy", f"policy {transition.after.policy.version}")
            case CheckpointCommitted():
                yield Happening("checkpoint", f"checkpoint {event.checkpoint.version}")
            case SessionResumed():
                yield Happening("resumed", f"the coordinator took over (epoch {event.epoch})")
            case ContinueJob():
                yield Happening("resumed", "goes on after a pause")
            case _:
                pass

    def _command(self, command: Command) -> Iterator[Happening]:
        match command:
            case IssuePrompts(purpose="eval"):
                yield Happening("eval", "evaluation")
            case IssuePrompts(replaces=None):
                yield Happening("step", f"step {command.step}")
            case AdoptDrafter():
                # sent to every worker, and again to workers that join later
                version = NAMED if command.drafter is None else command.drafter.version
                if version != self._drafter:
                    self._drafter = version
                    yield Happening("drafter", f"drafter {version} in use")
            case ExplainDrafterDecision():
                yield Happening("decision", describe_decision(command))
            case GiveUpSpeculation():
                yield Happening("speculation", "speculation paused")
            case ResumeSpeculation():
                yield Happening("speculation", "speculation tried again")
            case _:
                pass
