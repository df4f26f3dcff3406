"""Tell what a run's page shows after each entry of its journal, so that tests fit any recording."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tlt.protocol.commands import ExplainDrafterDecision
from tlt.protocol.events import DrafterDeltaReady
from tlt.report.journal_log_lines import log_lines
from tlt.runs.run_folder_reader import journal_entries, open_ledger


@dataclass(frozen=True)
class Shown:
    """Count what the page shows once this many entries are folded."""

    entries: int
    # steps whose rollout batch is complete
    steps: int
    # rows of the rewards: of steps and of evaluations
    rewards: int
    decisions: int
    # times of the drafter's losses
    losses: tuple[float, ...]
    log_lines: int


def growth(folder: Path) -> Iterator[Shown]:
    """Fold the journal of a run, and yield what is shown after each entry."""
    ledger = open_ledger(folder)
    decisions, logged, losses = 0, 0, tuple[float, ...]()
    for count, entry in enumerate(journal_entries(folder), 1):
        transition = ledger.add(entry.event, entry.at)
        logged += len(log_lines(ledger, transition))
        decisions += sum(isinstance(c, ExplainDrafterDecision) for c in transition.commands)
        if transition.counts and isinstance(entry.event, DrafterDeltaReady):
            losses += (entry.at,)
        rewards = {row.step for row in (*ledger.steps, *ledger.evals)}
        yield Shown(count, len(ledger.steps), len(rewards), decisions, losses, logged)


def around_an_inner_loss(losses: tuple[float, ...]) -> tuple[float, float]:
    """Return a part of the losses' times, as shares, in which there is a loss."""
    first, last = losses[0], losses[-1]
    shares = [(at - first) / (last - first) for at in losses[1:-1]]
    nearest = min(shares, key=lambda share: abs(share - 0.4))
    return max(0.02, nearest - 0.2), min(0.95, nearest + 0.2)
