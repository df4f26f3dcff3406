"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

SessionName = Annotated[str, typer.Option("--session", help="Name of the session.")]
JobOrFolder = Annotated[str, typer.Argument(help="A job of the session, or the folder of a run.")]
JobName = Annotated[str, typer.Argument(help="A job, as listed by `tlt jobs`.")]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Number of workers; by default one per core, or per GPU if on GPUs."),
]
Runs = Annotated[Path, typer.Option(help="Folder in which each job gets its folder.")]
SpecFile = Annotated[Path, typer.Argument(help="The job's YAML file.")]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="JOB[@STEP]",
        help="Start from a checkpoint of another job, or of a run's folder; by default its last.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the spec; repeatable."),
]
