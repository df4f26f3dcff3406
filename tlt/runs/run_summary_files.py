"""Write summary.json and progress.png into the folder of a run that has ended.

`python -m tlt.runs.run_summary_files FOLDER`; the coordinator starts it when a job ends.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec

from tlt.base.human_format import seconds
from tlt.report import SetFigures, Snapshot
from tlt.report.summary import summarise
from tlt.runs.run_folder_reader import read_snapshot
from tlt.spec.data_and_algorithm import ONE_SET

SUMMARY, PLOT = "summary.json", "progress.png"


def write_summary_files(snapshot: Snapshot, folder: Path) -> None:
    """Write the summary, and the plot if a step was finished."""
    if snapshot.steps:
        draw_progress(snapshot, folder / PLOT)
    # last, so that who finds the summary finds the plot, too
    with replacement_of(folder / SUMMARY) as unfinished:
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(summarise(snapshot))))


def draw_progress(snapshot: Snapshot, file: Path) -> None:
    """Plot rewards and answer lengths by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [step.step for step in snapshot.steps]
    figure: Any
    figure, axes = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    reward, length = axes
    reward.plot(steps, [s.reward for s in snapshot.steps], marker="o", label="rollouts, mean")
    for index, held_out in enumerate(snapshot.evals[0].sets if snapshot.evals else ()):
        done = [(each.step, each.sets[index]) for each in snapshot.evals]
        reward.errorbar(
            [step for step, _ in done],
            [figures.mean for _, figures in done],
            yerr=[figures.stderr for _, figures in done],
            marker="s",
            capsize=3,
            label=f"{_held_out(held_out)} ({held_out.problems} problems, ± standard error)",
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
    with replacement_of(file) as unfinished:
        figure.savefig(unfinished, dpi=110, format="png")
    pyplot.close(figure)


def _held_out(figures: SetFigures) -> str:
    return "held out" if figures.name == ONE_SET else f"{figures.name}, avg@{figures.answers}"


@contextlib.contextmanager
def replacement_of(file: Path) -> Generator[Path]:
    """Yield a new file that replaces `file` at the end.

    Its name is unique: the coordinator's process and `tlt submit --wait` may write at once.
    """
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    os.fchmod(handle, 0o644)
    os.close(handle)
    unfinished = Path(name)
    try:
        yield unfinished
        unfinished.replace(file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    run = Path(sys.argv[1])
    write_summary_files(read_snapshot(run), run)
