"""tlt config: show or check a job's spec."""

from pathlib import Path

import typer

from cli.arguments import Set, SpecFile
from cli.output import say
from cli.spec_loading import load_job
from tlt.dataset import rows
from tlt.spec_files import load_job_spec, to_yaml

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
    for name, file in (("train", data.train), ("eval", data.eval)):
        if file is not None:
            count = sum(1 for _ in rows(Path(file), data))
            say(f"data.{name}: {count} rows in {file}")
    say(f"{spec}: ok")
