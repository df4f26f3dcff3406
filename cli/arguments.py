"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

SessionName = Annotated[str, typer.Option("--session", help="Name of the session.")]
JobOrFolder = Annotated[str, typer.Argument(help="A job of the session, or the folder of a run.")]
JobName = Annotated[str, typer.Argument(help="A job, as listed by `tlt jobs`.")]
SpecFile = Annotated[Path, typer.Argument(help="The job's YAML file.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the spec; repeatable."),
]
