"""tlt export: write a run's policy or drafter as a folder that other programs load."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cli.arguments import JobOrFolder, SessionName
from cli.output import say
from tlt.errors import ConfigError
from tlt.runs.run_folder_reader import read_ledger
from tlt.session.client import run_folder

app = typer.Typer(help="Write a model of a run as a folder.", no_args_is_help=True)
_NewFolder = Annotated[Path, typer.Argument(help="The folder to write; must not exist.")]


@app.command()
def policy(
    job: JobOrFolder,
    folder: _NewFolder,
    best: Annotated[
        bool, typer.Option("--best", help="Take the policy that scored best instead of the last.")
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the LoRA adapter alone, as peft's folder.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Number format of the weights; by default that of the initial policy."),
    ] = None,
    session: SessionName = "default",
) -> None:
    """Write a job's policy as a folder that Transformers and SGLang load, with a model card.

    With policy.lora it is the merged one, unless `--adapter` is given.
    """
    from tlt.runs.export.policy_card import published_spec
    from tlt.runs.export.policy_export import export_adapter, export_policy

    run = run_folder(job, session)
    ledger = read_ledger(run)
    snapshot = ledger.snapshot()
    stored = snapshot.best if best else snapshot.last
    if stored is None:
        raise ConfigError(f"{job}: {'no best' if best else 'no checkpointed'} policy yet")
    if adapter:
        export_adapter(run, published_spec(ledger), stored, folder)
    else:
        export_policy(run, ledger, stored, folder, dtype)
    scores = (
        f", scored {done.mean:.3f} ± {done.stderr:.3f}"
        for done in snapshot.evals
        if done.version == stored.version
    )
    say(f"{folder}: policy of {job}, version {stored.version}{next(scores, '')}")


@app.command()
def drafter(job: JobOrFolder, folder: _NewFolder, session: SessionName = "default") -> None:
    """Write the drafter that a job trained and used as a folder that SGLang loads.

    Another job starts with it if its spec says `drafter: {path: FOLDER}`.
    """
    from tlt.runs.export.drafter_export import export_drafter

    run = run_folder(job, session)
    say(f"{folder}: {export_drafter(run, read_ledger(run), job, folder)}")
