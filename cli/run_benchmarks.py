"""tlt bench: run benchmarks and show whether this project's claims hold."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from cli.output import print_table, say
from tlt.errors import ConfigError, TltError

_ROOT = Path(__file__).resolve().parent.parent
_FOLDER = _ROOT / "benchmarks"


class _Claim(msgspec.Struct):
    name: str
    value: float
    unit: str
    bar: float
    holds: bool
    less_is_better: bool = False


class _Result(msgspec.Struct):
    commit: str
    host: dict[str, Any]
    seconds: float
    claims: list[_Claim]


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Benchmarks to run; without names, show the last results of all."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of the results, one JSON file for each benchmark.")
    ] = _FOLDER / "results",
) -> None:
    """Run benchmarks, or show their last results."""
    known = _catalogue()
    if unknown := [name for name in names or [] if name not in known]:
        raise ConfigError(f"no benchmark is called {unknown[0]}; there are {', '.join(known)}")
    for name in names or []:
        say(f"{name}: running")
        _run(name, out.resolve() / f"{name}.json")
    if not _show(names or _with_further_runs(known, out), out):
        raise typer.Exit(1)


def _run(name: str, file: Path) -> None:
    """Run a benchmark without its output; its exit code says only whether all claims hold."""
    before = file.stat().st_mtime_ns if file.exists() else None
    command = [sys.executable, "-m", f"benchmarks.{name}", "--out", str(file)]
    subprocess.run(command, cwd=_ROOT, check=False, stdout=subprocess.DEVNULL)
    if not file.exists() or file.stat().st_mtime_ns == before:
        raise TltError(f"the benchmark {name} ended without a result")


def _catalogue() -> list[str]:
    """Return the names of all benchmarks, in the order of their catalogue."""
    file = _FOLDER / "catalogue.py"
    if not file.is_file():
        raise ConfigError("the benchmarks are part of a checkout of tlt, and not installed with it")
    return list(runpy.run_path(str(file))["BENCHMARKS"])


def _with_further_runs(known: list[str], out: Path) -> list[str]:
    """Add results of further runs (`speculation_16`), each after its benchmark."""
    further = sorted({file.stem for file in out.glob("*.json")} - set(known))
    ordered = [
        name
        for benchmark in known
        for name in (benchmark, *(run for run in further if run.startswith(f"{benchmark}_")))
    ]
    return [*ordered, *(run for run in further if run not in ordered)]


def _show(names: list[str], out: Path) -> bool:
    """Print the claims, and return True if all of them hold."""
    lines: list[tuple[str, ...]] = []
    holds = True
    for name in names:
        file = out / f"{name}.json"
        if not file.is_file():
            lines.append((name, "not run yet", "", "", "", "", ""))
            continue
        result = msgspec.json.decode(file.read_bytes(), type=_Result)
        where = result.commit[:8], str(result.host.get("gpu") or result.host.get("cpu"))
        for claim in result.claims:
            sign = "≤" if claim.less_is_better else "≥"
            value = f"{claim.value:.4g} {claim.unit}"
            verdict = "yes" if claim.holds else "NO"
            lines.append((name, claim.name, value, f"{sign} {claim.bar:g}", verdict, *where))
            holds = holds and claim.holds
    print_table(("benchmark", "claim", "value", "bar", "holds", "commit", "machine"), lines)
    return holds
