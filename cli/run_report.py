"""Report a finished run: tables, a plot, and summary.json in the run's folder."""

from pathlib import Path
from typing import Any

import msgspec

from cli.drafter_tables import print_drafter_training
from cli.ledger import describe_savings, seconds_tables
from cli.output import console, say
from tlt.human_format import seconds, sparkline
from tlt.report import Snapshot
from tlt.report.summary import summarise


def report_run(snapshot: Snapshot, folder: Path) -> None:
    summary = folder / "summary.json"
    summary.write_bytes(msgspec.json.format(msgspec.json.encode(summarise(snapshot))))
    for table in seconds_tables(snapshot):
        console.print(table)
    if snapshot.drafter_training is not None:
        print_drafter_training(snapshot.drafter_training)
    if snapshot.acceptance:
        say(describe_savings(snapshot))
    if snapshot.steps:
        _say_curve("reward", [step.reward for step in snapshot.steps])
        _say_curve("length", [step.length.mean for step in snapshot.steps])
        plot = folder / "progress.png"
        _draw(snapshot, plot)
        say(f"plot     {plot}")
    say(f"summary  {summary}")
    if len(snapshot.evals) > 1:
        first, last = snapshot.evals[0], snapshot.evals[-1]
        gain = f"{100 * (last.mean - first.mean):+.1f} points"
        before, after = first.describe_score(), last.describe_score()
        say(f"held-out reward: {before} before, {after} after: {gain}")


def _say_curve(name: str, values: list[float]) -> None:
    low, high = min(values), max(values)
    say(
        f"{name}   {sparkline(values)}  {values[0]:.3g} → {values[-1]:.3g}"
        f"  (lowest {low:.3g}, highest {high:.3g})"
    )


def _draw(snapshot: Snapshot, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [step.step for step in snapshot.steps]
    figure: Any
    figure, axes = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    reward, length = axes
    reward.plot(steps, [s.reward for s in snapshot.steps], marker="o", label="rollouts, mean")
    if snapshot.evals:
        reward.errorbar(
            [done.step for done in snapshot.evals],
            [done.mean for done in snapshot.evals],
            yerr=[done.stderr for done in snapshot.evals],
            marker="s",
            capsize=3,
            label=f"held out ({snapshot.evals[0].problems} problems, ± standard error)",
        )
    reward.set_ylabel("reward")
    reward.legend()
    for name, values in (
        ("mean", [s.length.mean for s in snapshot.steps]),
        ("p90", [s.length.p90 for s in snapshot.steps]),
        ("longest", [s.length.max for s in snapshot.steps]),
    ):
        length.plot(steps, values, marker="o", label=name)
    length.set_ylabel("answer length (tokens)")
    length.set_xlabel("step")
    length.legend()
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.suptitle(f"{snapshot.job}: {seconds(snapshot.seconds)}")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
