"""Print evaluations: one line for each set of each of them."""

from collections.abc import Sequence

from cli.output import print_table
from tlt.report import EvalSummary, SetFigures


def print_evaluations(evaluations: Sequence[EvalSummary]) -> None:
    sets = [each for done in evaluations for each in done.sets]
    shares = sorted({k for each in sets for k in each.pass_at})
    columns = (
        *("step", "policy", "set", "problems", "answers", "avg@answers", "±"),
        *(f"pass@{k}" for k in shares),
        *("maj@answers", "length", "cut off", "no reward", "too long"),
    )
    rows = [
        (str(done.step), str(done.version), *_cells(each, shares))
        for done in evaluations
        for each in done.sets
    ]
    print_table(columns, rows)


def _cells(each: SetFigures, shares: Sequence[int]) -> tuple[str, ...]:
    return (
        each.name,
        str(each.problems),
        str(each.answers),
        f"{each.mean:.3f}",
        f"{each.stderr:.3f}",
        *(f"{each.pass_at[k]:.3f}" if k in each.pass_at else "" for k in shares),
        "" if each.majority is None else f"{each.majority:.3f}",
        f"{each.length.mean:.0f}",
        f"{100 * each.truncated:.1f} %",
        str(each.unscored),
        str(each.skipped),
    )
