"""Inject seeded faults into live jobs, and count the answers that are lost or counted twice.

`python -m tests.chaos --rounds N --seed S [--jobs J] [--minutes M] [--add FILE ...] [--out FILE]`

It starts sessions of its own, and after each fault waits until all processes are up and the job's
journal has a new event. Each job is checked at its end. The file is written after each job; `--add`
adds those of runs with other seeds.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from random import Random

from rich.console import Console

from benchmarks.result import save_result, write_result
from tests.chaos.plan import FAULTS, draw
from tests.chaos.results import Results
from tests.chaos.runner import CHANGES, SPEC, Runner
from tests.chaos.session import NotRecovered, session

_FAULTS_A_JOB = 10


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.list:
        print(*FAULTS, sep="\n")
        return
    jobs = arguments.jobs or -(-arguments.rounds // _FAULTS_A_JOB)
    results, dice = Results(), Random(arguments.seed)
    for number, file in enumerate(arguments.add, start=1):
        results.add(file, f"run {number}")
    earlier, began = results.seconds, time.monotonic()
    runner = Runner(dice, results)
    plan = draw(arguments.rounds - len(results.injected), jobs, dice, arguments.only)
    while plan and results.seconds - earlier < arguments.minutes * 60:
        root = Path(tempfile.mkdtemp(prefix="tlt-chaos-"))
        with session(root) as own:
            runner.use(own)
            while plan and runner.session is own:
                _run_job(runner, plan.pop(0), root)
                results.seconds = earlier + time.monotonic() - began
                _save(results, arguments)
                if results.seconds - earlier > arguments.minutes * 60:
                    plan.clear()
        shutil.rmtree(root, ignore_errors=True)
    Console().print(results.table())
    write_result(
        "chaos",
        results.claims(arguments.rounds, jobs),
        results.details(spec=SPEC.name, changes=CHANGES),
        results.seconds,
        arguments.out,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200, help="faults (200)")
    parser.add_argument("--jobs", type=int, help="jobs that share them (one for ten faults)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no job after them (60)")
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), metavar="FAULT", default=())
    parser.add_argument("--list", action="store_true", help="print the names of all faults")
    parser.add_argument("--add", type=Path, nargs="+", default=(), help="results of other runs")
    parser.add_argument("--out", type=Path)
    return parser


def _run_job(runner: Runner, faults: tuple[str, ...], root: Path) -> None:
    """Run a job; leave a session that doesn't recover, and keep what it has left."""
    try:
        runner.run_job(faults)
    except (NotRecovered, AssertionError) as error:
        failures = runner.results.not_recovered
        kept = shutil.copytree(root, f"{root}-{len(failures)}", symlinks=True, ignore=_sockets)
        failures.append(f"{runner.fault}: {error}")
        print(f"{failures[-1]}\nwhat it has left is in {kept}", flush=True)
        runner.session = None


def _save(results: Results, arguments: argparse.Namespace) -> None:
    claims, details = results.claims(arguments.rounds, 1), results.details()
    save_result("chaos", claims, details, results.seconds, arguments.out)


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder, name).is_socket()]


if __name__ == "__main__":
    main()
