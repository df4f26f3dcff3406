"""The plot of a soak: memory of each role's processes, and what the whole session holds."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.soak_samples import Sample

_ROLES = (
    *("rank", "worker", "coordinator", "reward scorer", "reward child", "preparer"),
    *(
        "supervisor",
        "dashboard",
        "Redis",
        "Ray's driver",
        "Ray's raylet",
        "Ray's GCS",
        "Ray's agents",
    ),
)
_TOTALS = (
    *("shared memory, MB", "Redis's memory, MB", "Redis's file, MB", "logs, MB"),
    *("session's journal, MB", "Ray's files, MB", "Redis's keys", "processes"),
)


def draw(samples: Sequence[Sample], kills: Sequence[tuple[float, str]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(7, 3, figsize=(13, 17), sharex=True, layout="constrained")
    for axis, role in zip(axes.flat, _ROLES, strict=False):
        lives: dict[object, list[tuple[float, float]]] = defaultdict(list)
        for sample in samples:
            for each in sample.processes:
                if each.role == role:
                    lives[each.process].append((sample.at / 60, each.anonymous_mb))
        for life in lives.values():
            axis.plot(*zip(*life, strict=True), linewidth=1)
        axis.set_title(f"{role}: memory, MB", fontsize=10)
    for axis, name in zip(list(axes.flat)[len(_ROLES) :], _TOTALS, strict=True):
        known = [(s.at / 60, s.totals[name]) for s in samples if name in s.totals]
        if known:
            axis.plot(*zip(*known, strict=True), linewidth=1)
        axis.set_title(name, fontsize=10)
    for axis in axes.flat:
        for at, _ in kills:
            axis.axvline(at / 60, color="0.85", linewidth=0.6, zorder=0)
        axis.set_ylim(0, 1.15 * axis.get_ylim()[1])
    figure.supxlabel("minutes; each line is one process's life, grey: a process was killed")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
