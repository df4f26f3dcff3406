"""tlt config: show or check a job's spec."""

import typer

from cli.arguments import Set, SpecFile
from cli.output import say
from cli.spec_loading import load_job
from tlt.data.dataset import data_of_set, rows
from tlt.spec.config import DataSpec
from tlt.spec.spec_files import load_job_spec, to_yaml

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
