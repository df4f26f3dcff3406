"""tlt export: folders that others load, out of a run: its policy, its drafter."""

import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from cli.journal_follow import fold, folded, open_ledger
from cli.output import say
from cli.session_client import run_folder
from cli.session_commands import SessionName
from tlt.blobs import Blobs
from tlt.config import JobSpec
from tlt.errors import ConfigError
from tlt.report import Kept, Snapshot

app = typer.Typer(help="Take something out of a run.", no_args_is_help=True)


@app.command()
def policy(
    job: Annotated[str, typer.Argument(help="A job of the session, or a run's folder.")],
    folder: Annotated[Path, typer.Argument(help="Where to write it; must not exist.")],
    best: Annotated[
        bool, typer.Option("--best", help="The one that scored best, not the last one.")
    ] = False,
    session: SessionName = "default",
) -> None:
    """Write a job's policy as a folder that Transformers and SGLang load."""
    run = run_folder(job, session)
    snapshot = fold(run)
    kept = snapshot.best if best else snapshot.last
    if kept is None:
        raise ConfigError(f"{job}: {'no best' if best else 'no checkpointed'} policy yet")
    write_policy(run, open_ledger(run).spec, kept, folder)
    say(f"{folder}: policy of {job}, version {kept.version}{_score(snapshot, kept)}")


@app.command()
def drafter(
    job: Annotated[str, typer.Argument(help="A job of the session, or a run's folder.")],
    folder: Annotated[Path, typer.Argument(help="Where to write it; must not exist.")],
    session: SessionName = "default",
) -> None:
    """Write the drafter that a job trained and used, as a folder that SGLang loads.

    The next job begins with it: `drafter: {path: FOLDER}`.
    """
    from cli.drafter_export import write_drafter

    run = run_folder(job, session)
    said = write_drafter(run, folded(run), job, folder)
    say(f"{folder}: {said}")


def write_policy(run: Path, spec: JobSpec, kept: Kept, folder: Path) -> None:
    with whole_or_not(folder) as unfinished:
        base = Path(spec.policy.path)
        for file in base.iterdir():
            if file.is_file() and not _holds_weights(file):
                shutil.copyfile(file, unfinished / file.name)
        blobs = Blobs(run / "blobs", run / "blobs")
        shutil.copyfile(blobs.verify(kept.weights), unfinished / "model.safetensors")
        _state_precision(unfinished / "config.json")


@contextmanager
def whole_or_not(folder: Path) -> Generator[Path]:
    """What is written inside lies at its place when it is whole, or not at all."""
    if folder.exists():
        raise ConfigError(f"{folder}: exists already")
    unfinished = folder.with_name(f".{folder.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        os.rename(unfinished, folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _holds_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt") or file.name.endswith(".index.json")


def _state_precision(config: Path) -> None:
    """The trainer's weights are fp32, whatever the folder it began with said."""
    content = json.loads(config.read_text())
    content.pop("torch_dtype", None)
    content["dtype"] = "float32"
    config.write_text(json.dumps(content, indent=2) + "\n")


def _score(snapshot: Snapshot, kept: Kept) -> str:
    for done in snapshot.evals:
        if done.version == kept.version:
            return f", scored {done.mean:.3f} ± {done.stderr:.3f}"
    return ""
