"""What a run amounted to: a table of seconds, a plot, and summary.json in the run's folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cli.drafter_tables import print_drafting
from cli.ledger import seconds_tables, speculation_line
from cli.output import console, say
from tlt.human_format import seconds
from tlt.report import Drafting, Snapshot
from tlt.report.log_lines import accuracy

_BLOCKS = "▁▂▃▄▅▆▇█"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    job: str | None
    status: str
    error: str | None
    steps: int
    seconds: float
    # of the whole, by what the job was at
    phases: dict[str, float]
    # of each worker, by duty
    workers: dict[str, dict[str, float]]
    eval_before: float | None
    eval_before_stderr: float | None
    eval_after: float | None
    eval_after_stderr: float | None
    eval_problems: int
    policy_version: int
    worker_losses: int
    device_seconds: float
    # by speculation, on all ranks together, and the interval of 95 %; none without a control run
    saved_seconds: float | None
    saved_low: float | None
    saved_high: float | None
    # what it cost to know
    control_cost: float | None
    # of the generated tokens, those that were learned from
    trained: float
    drafting: Drafting | None


def summarise(snapshot: Snapshot) -> Summary:
    saved = snapshot.saved
    before = snapshot.evals[0] if snapshot.evals else None
    after = snapshot.evals[-1] if len(snapshot.evals) > 1 else None
    return Summary(
        job=snapshot.job,
        status=snapshot.status,
        error=snapshot.error,
        steps=len([step for step in snapshot.steps if step.learn_seconds is not None]),
        seconds=snapshot.seconds,
        phases=snapshot.phases,
        workers={str(worker): duties for worker, duties in sorted(snapshot.workers.items())},
        eval_before=before.mean if before else None,
        eval_before_stderr=before.stderr if before else None,
        eval_after=after.mean if after else None,
        eval_after_stderr=after.stderr if after else None,
        eval_problems=before.problems if before else 0,
        policy_version=snapshot.version,
        worker_losses=snapshot.losses,
        device_seconds=snapshot.device_seconds,
        saved_seconds=saved.total.seconds if saved else None,
        saved_low=saved.total.low if saved else None,
        saved_high=saved.total.high if saved else None,
        control_cost=saved.control_cost if saved else None,
        trained=snapshot.trained,
        drafting=snapshot.drafting,
    )


def report(snapshot: Snapshot, folder: Path) -> Summary:
    """Show it and write it beside the journal."""
    summary = summarise(snapshot)
    (folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary)))
    for table in seconds_tables(snapshot):
        console.print(table)
    if snapshot.drafting is not None:
        print_drafting(snapshot.drafting)
    if snapshot.acceptance:
        say(speculation_line(snapshot))
    _say_curves(snapshot)
    if snapshot.steps:
        plot = folder / "progress.png"
        _draw(snapshot, plot)
        say(f"plot     {plot}")
    say(f"summary  {folder / 'summary.json'}")
    if len(snapshot.evals) > 1:
        first, last = snapshot.evals[0], snapshot.evals[-1]
        gain = f"{100 * (last.mean - first.mean):+.1f} points"
        say(f"held-out reward: {accuracy(first)} before, {accuracy(last)} after: {gain}")
    return summary


def _say_curves(snapshot: Snapshot) -> None:
    curves: dict[str, Sequence[float]] = {
        "reward": [step.reward for step in snapshot.steps],
        "length": [step.length.mean for step in snapshot.steps],
    }
    for name, values in curves.items():
        if values:
            low, high = min(values), max(values)
            say(
                f"{name}   {spark(values)}  {values[0]:.3g} → {values[-1]:.3g}"
                f"  (lowest {low:.3g}, highest {high:.3g})"
            )


def spark(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    width = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, int(8 * (value - low) / width))] for value in values)


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
