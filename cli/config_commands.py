"""tlt config show, tlt config check."""

from pathlib import Path
from typing import Annotated

import typer

from cli.output import say
from cli.spec_loading import load_job
from tlt.dataset import rows
from tlt.spec_files import load_job_spec, to_yaml

app = typer.Typer(help="Look at a job's spec.", no_args_is_help=True)
_Spec = Annotated[Path, typer.Argument(help="The job's YAML file.")]
_Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the spec.")
]


@app.command()
def show(spec: _Spec, changes: _Set = None) -> None:
    """The whole spec, defaults included, paths absolute."""
    typer.echo(to_yaml(load_job_spec(spec, changes)), nl=False)


@app.command()
def check(spec: _Spec, changes: _Set = None) -> None:
    """The spec, that what it names is there, and every row of its data."""
    loaded = load_job(spec, changes)
    data = loaded.data
    for name, file in (("train", data.train), ("eval", data.eval)):
        if file is not None:
            count = sum(1 for _ in rows(Path(file), data))
            say(f"data.{name}: {count} rows in {file}")
    say(f"{spec}: ok")
