"""Load specs for the commands; tlt config shows or checks one."""

from pathlib import Path

import typer

from cli.arguments import Set, SpecFile
from cli.output import complain, say
from tlt.data.dataset import data_of_set, rows
from tlt.loggers.installed_check import refuse_missing
from tlt.spec.config import DataSpec, JobSpec
from tlt.spec.spec_files import load_job_spec, require_files, to_yaml


def load_runnable(path: Path, changes: list[str] | None) -> JobSpec:
    """Check what takes no tokenizer; the rest is checked when the job is prepared."""
    spec = load_job_spec(path, changes)
    require_files(spec, str(path))
    for warning in spec.warnings:
        complain(f"warning: {path}: {warning}")
    return spec


def load_job(path: Path, changes: list[str] | None) -> JobSpec:
    """Load a spec to submit; its loggers must be installed."""
    spec = load_runnable(path, changes)
    refuse_missing(spec.loggers, str(path))
    return spec


app = typer.Typer(help="Show or check a job's spec.", no_args_is_help=True)


@app.command()
def show(spec: SpecFile, changes: Set = None) -> None:
    """Print the whole spec with its defaults and absolute paths."""
    typer.echo(to_yaml(load_job_spec(spec, changes)), nl=False)


@app.command()
def check(spec: SpecFile, changes: Set = None) -> None:
    """Check the spec, the files that it names, and every row of its data."""
    loaded = load_job(spec, changes)
    data = loaded.data
    if loaded.algorithm.steps:
        for source in data.sources:
            count = _count_rows(source.path, data.of_source(source))
            say(f"data.train: {count} rows in {source.path}")
    for name, held_out in data.evaluation_sets.items():
        key = "data.eval" if isinstance(data.eval, str) else f"data.eval.{name}"
        count = _count_rows(held_out.path, data_of_set(data, held_out))
        answers = f", {held_out.answers} answers each" if held_out.answers > 1 else ""
        say(f"{key}: {count} rows in {held_out.path}{answers}")
    say(f"{spec}: ok")


def _count_rows(file: str, data: DataSpec) -> int:
    return sum(1 for _ in rows(file, data))
