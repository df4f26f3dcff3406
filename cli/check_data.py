"""tlt data: check the data of a job before it trains on them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from cli.arguments import Json, Set, SpecFile
from cli.config import load_runnable
from cli.output import complain, print_json, print_table, say
from tlt.doctor.findings import Finding

if TYPE_CHECKING:
    from tlt.doctor.data_check.prompt_sets import SetFigures

app = typer.Typer(help="Look at a job's data.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Keep `check` a subcommand."""


@app.command()
def check(
    spec: SpecFile,
    limit: Annotated[
        int, typer.Option(min=1, help="Rows of each set whose gold is scored, spread evenly.")
    ] = 200,
    all_rewards: Annotated[
        bool, typer.Option("--all-rewards", help="Call judges and reward models, too.")
    ] = False,
    changes: Set = None,
    json: Json = False,
) -> None:
    """Check a job's data: lengths, repeats, leakage, and what each reward gives to the gold.

    The exit code is 1 if something is wrong: held-out prompts that are trained on, or a reward that
    gives nothing to most right answers.
    """
    loaded = load_runnable(spec, changes)
    # imported here because transformers is slow to import
    from tlt.doctor.data_check.check_data import check_data

    report = check_data(loaded, limit, all_rewards)
    if json:
        print_json({**msgspec.structs.asdict(report), "ok": not report.wrong})
    else:
        _print_sets(report.sets)
        _print_findings(report.findings)
    if report.wrong:
        complain(f"{spec}: wrong: {', '.join(each.subject for each in report.wrong)}")
        raise typer.Exit(1)
    if not json:
        say(f"{spec}: nothing is wrong")


def _print_sets(sets: "Sequence[SetFigures]") -> None:
    print_table(
        ("prompts", "rows", "median tokens", "p95", "longest", "too long", "repeated", "no answer"),
        [tuple(map(str, msgspec.structs.astuple(each))) for each in sets],
    )


def _print_findings(findings: Sequence[Finding]) -> None:
    say("")
    print_table(
        ("what", "found", "status", "what to do"),
        [(each.subject, each.found, each.status, each.advice) for each in findings],
    )
