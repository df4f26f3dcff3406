"""Report a finished run: tables on the terminal, a plot and summary.json in the run's folder."""

from pathlib import Path

from cli.drafter_tables import print_drafter_training
from cli.evaluation_tables import print_evaluations
from cli.ledger import describe_savings, seconds_tables
from cli.output import console, say
from tlt.base.human_format import sparkline
from tlt.report import Snapshot
from tlt.runs.run_summary_files import PLOT, SUMMARY, write_summary_files


def report_run(snapshot: Snapshot, folder: Path) -> None:
    write_summary_files(snapshot, folder)
    for table in seconds_tables(snapshot):
        console.print(table)
    if snapshot.drafter_training is not None:
        print_drafter_training(snapshot.drafter_training)
    if snapshot.acceptance:
        say(describe_savings(snapshot))
    if snapshot.steps:
        _say_curve("reward", [step.reward for step in snapshot.steps])
        _say_curve("length", [step.length.mean for step in snapshot.steps])
        if replaced := sum(step.replaced_groups for step in snapshot.steps):
            extra = sum(step.extra_answers for step in snapshot.steps)
            say(f"sampling {replaced} groups that agreed were replaced, by {extra} answers")
        if retracted := sum(step.retractions for step in snapshot.steps):
            say(f"memory   SGLang retracted {retracted} answers and read them again")
        say(f"plot     {folder / PLOT}")
    say(f"summary  {folder / SUMMARY}")
    if snapshot.starts_from is not None:
        say(f"started from {snapshot.starts_from}")
    if len(snapshot.evals) > 1:
        first, last = snapshot.evals[0], snapshot.evals[-1]
        gain = f"{100 * (last.mean - first.mean):+.1f} points"
        gain = gain if last.gain is None else last.gain.describe()
        before, after = first.describe_score(), last.describe_score()
        say(f"held-out reward: {before} before, {after} after: {gain}")
        if any(done.describe_sets() for done in (first, last)):
            print_evaluations([first, last])


def _say_curve(name: str, values: list[float]) -> None:
    low, high = min(values), max(values)
    say(
        f"{name}   {sparkline(values)}  {values[0]:.3g} → {values[-1]:.3g}"
        f"  (lowest {low:.3g}, highest {high:.3g})"
    )
