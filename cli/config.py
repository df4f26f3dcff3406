"""Load specs for the commands; tlt config shows or checks one."""

from pathlib import Path

import typer

from cli.arguments import Set, SpecFile
from cli.output import complain, say
from tlt.data.dataset import rows
from tlt.data.source_check import check_sources
from tlt.loggers.installed_check import refuse_missing
from tlt.spec.config import JobSpec
from tlt.spec.prompt_files import PromptFile, eval_files, train_files
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
    # imported here because torch is slow to import
    from tlt.preparation.default_speculation import settle_speculation

    settled, why = settle_speculation(load_job_spec(spec, changes))
    if why is not None:
        complain(f"{spec}: no speculation: {why}")
    typer.echo(to_yaml(settled), nl=False)


@app.command()
def check(spec: SpecFile, changes: Set = None) -> None:
    """Check the spec, the files that it names, and every row of its data."""
    loaded = load_job(spec, changes)
    data = loaded.data
    if (named := loaded.policy.path) == loaded.policy.hub_id:
        say(f"policy.path: no folder {named} beside the spec; taken for a model of the Hub")
    if loaded.algorithm.steps:
        for source in train_files(data, loaded.environment):
            say(f"data.train: {_count_rows(source)} rows in {source.path}")
    for held_out in eval_files(data, loaded.environment):
        count = data.evaluation_sets[held_out.name].answers
        answers = f", {count} answers each" if count > 1 else ""
        say(f"{held_out.key}: {_count_rows(held_out)} rows in {held_out.path}{answers}")
    check_sources(loaded)
    say(f"{spec}: ok")


def _count_rows(file: PromptFile) -> int:
    return sum(1 for _ in rows(file))
