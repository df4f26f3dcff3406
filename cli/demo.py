"""tlt demo: run a job in a session of its own, report on it, and leave only the run's folder."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cli.arguments import Runs, Set, Workers
from cli.config import load_job
from cli.dashboard import start_dashboard, stop_dashboard
from cli.job_commands import watch
from cli.output import complain, say, say_outcome
from cli.run_report import report_run
from tlt.protocol.shared_values import JobRecord
from tlt.runs.run_folder_reader import read_snapshot
from tlt.session.client import with_client
from tlt.session.control import forget_session, new_session, start_session, stop_session
from tlt.spec.config import JobSpec

_SESSION = "demo"
_CONFIGS = Path(__file__).resolve().parent.parent / "configs"
_SPEC = _CONFIGS / "tiny-reasoner.yaml"
# a job of a size for SGLang on a CPU
_SGLANG_SPEC = _CONFIGS / "tiny-reasoner-sglang.yaml"
_SMOLLM2_SPEC = _CONFIGS.parent / "examples" / "smollm2" / "job.yaml"


def demo(
    spec: Annotated[Path, typer.Option("--spec", help="Train this job instead.")] = _SPEC,
    model: Annotated[
        Literal["tiny-reasoner", "smollm2"],
        typer.Option(help="smollm2 has 135M weights: 93 MB to download, 540 MB in TLT_HOME."),
    ] = "tiny-reasoner",
    workers: Workers = None,
    engine: Annotated[str | None, typer.Option(help="Engine: native or sglang.")] = None,
    runs: Runs = Path("runs"),
    changes: Set = None,
    dashboard: Annotated[bool, typer.Option(help="Serve the live page meanwhile.")] = True,
) -> None:
    """Train a tiny reasoner with reinforcement learning on this machine, or SmolLM2-135M."""
    chosen = [] if engine is None else [f"rollout.engine={engine}"]
    if model == "smollm2" and spec == _SPEC:
        # the example downloads a model, which no other command does
        from examples.smollm2.prepare import prepare

        spec, chosen = _SMOLLM2_SPEC, [*chosen, f"policy.path={prepare(say)}"]
    elif engine == "sglang" and spec == _SPEC:
        spec = _SGLANG_SPEC
    loaded = load_job(spec, [*chosen, *(changes or [])])
    session = new_session(
        _SESSION,
        workers=workers,
        ranks=1,
        redis_url=None,
        runs=runs,
        device="cpu",
        lease_seconds=15.0,
    )
    forget_session(session)  # do not resume a demo that was interrupted
    say(f"starting {session.workers} workers, a coordinator, a reward actor and Redis")
    start_session(session, ends_with_us=True)
    try:
        address = start_dashboard(_SESSION, ends_with_us=True) if dashboard else None
        if address is not None:
            say(f"dashboard  {address}")
        record = _run(loaded)
    except KeyboardInterrupt:
        complain("interrupted; the session ends, the run's folder stays")
        raise typer.Exit(130) from None
    finally:
        stop_dashboard(_SESSION)
        stop_session(_SESSION)
    folder = Path(record.folder)
    if (folder / "journal.jsonl").exists():
        report_run(read_snapshot(folder), folder)
    if record.status != "done":
        say_outcome(record.job, record.status, record.error)
        raise typer.Exit(1)


def _run(spec: JobSpec) -> JobRecord:
    record = with_client(_SESSION, lambda client: client.jobs.submit(spec))
    say(f"submitted {record.job} ({record.folder})")
    return watch(_SESSION, record)
