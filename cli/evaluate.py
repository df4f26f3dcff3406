"""tlt eval: evaluate a policy by a job without training, in a session that is up or its own."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cli.arguments import From, Json, Runs, Set, SpecFile, Workers
from cli.evaluation_tables import print_evaluations
from cli.job_commands import await_end, watch
from cli.output import complain, print_json, say, say_outcome
from cli.session_commands import choose_cuda_workers
from tlt.errors import ConfigError
from tlt.protocol.shared_values import JobRecord
from tlt.runs.run_folder_reader import read_snapshot
from tlt.session.client import with_client
from tlt.session.control import new_session, start_session, stop_session
from tlt.session.job_submission import submit_job
from tlt.session.session_files import is_up, session_folder
from tlt.spec.evaluation_job import evaluation_job
from tlt.spec.spec_files import load_job_spec, require_files

_DEFAULT_SESSION = "default"


def evaluate(
    spec: SpecFile,
    policy: Annotated[
        Path | None,
        typer.Option(help="A model folder or an id on the Hub; the spec's policy by default."),
    ] = None,
    start: From = None,
    changes: Set = None,
    session: Annotated[
        str | None,
        typer.Option(
            help="Name of the session; by default `default` if it is up, else one of its own."
        ),
    ] = None,
    workers: Workers = None,
    device: Annotated[str, typer.Option(help="Device of its own session: cpu or cuda.")] = "cpu",
    runs: Runs = Path("runs"),
    json: Json = False,
) -> None:
    """Evaluate a policy on every set of the spec's data.eval.

    It is a job without training: its answers stay in the run's folder, where `tlt samples` reads
    them. Policies get the same noise, so that the same policy gives the same answers as in the
    evaluations of a training job with the spec's seed.
    """
    if policy is not None and start is not None:
        raise ConfigError("--policy and --from both name a policy: leave one out")
    job = evaluation_job(load_job_spec(spec, changes), str(spec), policy)
    require_files(job, str(spec))
    with _session_for(session, workers, device, runs, quiet=json) as name:
        record = submit_job(name, job, start)
        try:
            ended = await_end(name, record) if json else _follow(name, record)
        except KeyboardInterrupt:
            with_client(name, lambda client: client.jobs.cancel(record.job))
            complain(f"interrupted; {record.job} is cancelled")
            raise typer.Exit(130) from None
    if ended.status != "done":
        say_outcome(ended.job, ended.status, ended.error)
        raise typer.Exit(1)
    folder = Path(ended.folder)
    done = read_snapshot(folder).evals[-1]
    if json:
        about = {"policy": start or job.policy.path, "job": ended.job, "folder": str(folder)}
        print_json(about | msgspec.to_builtins(done))
        return
    print_evaluations([done])
    say(f"{done.describe_score()} ({start or job.policy.path})")
    say(f"answers: tlt samples {folder} --eval")


@contextmanager
def _session_for(
    name: str | None, workers: int | None, device: str, runs: Path, *, quiet: bool
) -> Generator[str]:
    """Yield a session that is up, or start one that ends with the evaluation."""
    if name is not None or is_up(session_folder(_DEFAULT_SESSION)):
        yield name or _DEFAULT_SESSION
        return
    if device == "cuda":
        workers = choose_cuda_workers(workers, 1, runs, None)
    own = new_session(
        f"eval-{os.getpid()}",
        workers=workers,
        ranks=1,
        redis_url=None,
        runs=runs,
        device=device,
        lease_seconds=15.0,
    )
    if not quiet:
        say(f"no session is up: starting {own.workers} workers for this evaluation")
    start_session(own, ends_with_us=True)
    try:
        yield own.name
    finally:
        stop_session(own.name)
    shutil.rmtree(own.folder, ignore_errors=True)


def _follow(session: str, record: JobRecord) -> JobRecord:
    ahead = [
        other.job
        for other in with_client(session, lambda client: client.jobs.all())
        if other.status in ("queued", "preparing", "running") and other.job != record.job
    ]
    if ahead:
        say(f"{record.job} waits for {', '.join(ahead)}")
    return watch(session, record)
