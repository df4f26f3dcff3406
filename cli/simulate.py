"""tlt simulate: say which cure for long answers pays, before it is bought or built."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from cli.arguments import Json, Set, SpecFile
from cli.output import print_json, print_table, say
from tlt.errors import ConfigError
from tlt.runs.run_folder_reader import journal_entries, open_ledger
from tlt.simulation.comparison import Comparison, Outcome, compare
from tlt.simulation.inputs import Inputs, combine
from tlt.simulation.job import Job
from tlt.simulation.run_fit import RunFit
from tlt.simulation.speed_up_plot import draw
from tlt.simulation.world import Use
from tlt.spec.spec_files import load_job_spec

# worker seconds of a step that the update doesn't wait for, and those that nothing waits for
_USES: tuple[Use, ...] = ("ahead", "discarded", "drafter", "unused")
_COLUMNS = (
    *("speed-up", "seconds a step", "device-seconds", "decoding ahead", "decoded again"),
    *("training the drafter", "unused", "older weights"),
)


def simulate(
    spec: SpecFile,
    workers: Annotated[
        str, typer.Option(help="Numbers of workers, such as 8,16,64; one has an engine each.")
    ],
    from_run: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Take lengths and costs from a run's folder."),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="YAML file of lengths and costs, before those of the run."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to simulate in each mode.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the answers' lengths.")] = 0,
    changes: Set = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the speed-ups as an SVG file.")
    ] = None,
    json: Json = False,
) -> None:
    """Simulate a job on some numbers of workers, with each cure for long answers and without."""
    counts = _parse_workers(workers)
    job = Job(
        spec=load_job_spec(spec, changes),
        inputs=combine(_read_costs(costs), None if from_run is None else _fit(from_run)),
        workers=1,
        steps=steps,
        seed=seed,
    )
    compared = compare(job, counts)
    if plot is not None:
        plot.write_text(draw(compared.outcomes))
    if json:
        print_json(compared)
    else:
        _print(compared)


def _parse_workers(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ConfigError(f"--workers: {text!r} must be numbers with commas, such as 8,16,64")
    return counts


def _read_costs(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def read_fit(folder: Path) -> RunFit:
    ledger, fit = open_ledger(folder), RunFit()
    for entry in journal_entries(folder):
        fit.add(ledger.add(entry.event, entry.at))
    return fit


def _fit(folder: Path) -> Inputs:
    fit = read_fit(folder)
    return fit.job(fit.whole_steps()).inputs


def _print(compared: Comparison) -> None:
    for workers, advice in compared.advice.items():
        rows = [_row(each) for each in compared.outcomes if each.workers == workers]
        print_table((f"{workers} workers", *_COLUMNS), rows)
        say(advice)


def _row(outcome: Outcome) -> list[str]:
    spent = (outcome.device_seconds, *(outcome.uses[use] for use in _USES))
    figures = [f"{outcome.speed_up:.2f}x", f"{outcome.seconds:.1f}"]
    figures += [*(f"{each:.0f}" for each in spent), f"{100 * outcome.older:.0f} %"]
    return [_describe(outcome), *figures]


def _describe(outcome: Outcome) -> str:
    """Name a mode with the sizes that were best."""
    mode = outcome.mode
    name = mode.name.replace("groups", f"groups (+{100 * mode.defer_long:.0f} %)")
    return name.replace("answers", f"answers (+{100 * mode.partial:.0f} %)")
