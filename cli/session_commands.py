"""tlt up, down, status: start, end and show a session."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cli.arguments import Json, Runs, SessionName, Workers
from cli.cuda_start_check import choose_cuda_workers
from cli.dashboard import start_dashboard, stop_dashboard
from cli.output import print_json, print_table, say
from tlt.id_types import WorkerId
from tlt.protocol.shared_values import Heartbeat, JobRecord
from tlt.session_client import Client, with_client
from tlt.session_control import (
    find_session,
    new_session,
    session_option,
    start_session,
    stop_session,
)
from tlt.store.redis_connection import hide_password


def up(
    workers: Workers = None,
    ranks: Annotated[
        int, typer.Option(min=1, help="Ranks (compute processes) of each worker.")
    ] = 1,
    redis_url: Annotated[
        str | None,
        typer.Option(
            help="redis://, rediss:// or unix:// URL; by default the session starts its own."
        ),
    ] = None,
    runs: Runs = Path("runs"),
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = "cpu",
    lease_seconds: Annotated[
        float,
        typer.Option(min=1.0, help="Seconds of silence after which a worker is considered lost."),
    ] = 15.0,
    reward_workers: Annotated[
        int, typer.Option(min=1, help="Answers that each reward scores at once.")
    ] = 8,
    session: SessionName = "default",
    dashboard: Annotated[bool, typer.Option(help="Also serve the live page.")] = True,
) -> None:
    """Start a session in the background; with --device cuda, check the machine first."""
    if device == "cuda":
        workers = choose_cuda_workers(workers, ranks, runs, redis_url)
    spec = new_session(
        session,
        workers=workers,
        ranks=ranks,
        redis_url=redis_url,
        runs=runs,
        device=device,
        lease_seconds=lease_seconds,
        reward_workers=reward_workers,
    )
    pid = start_session(spec)
    named = session_option(session)
    say(f"session '{session}' is up: {spec.workers} workers, process {pid}")
    say(f"  redis  {hide_password(spec.redis_url)}")
    say(f"  runs   {spec.runs}")
    say(f"  logs   {spec.folder}/logs")
    address = start_dashboard(session) if dashboard else None
    if address is not None:
        say(f"  page   {address}")
    say(f"next:    tlt submit configs/tiny-reasoner.yaml --wait{named}")
    say(f"         tlt status{named}")
    say(f"         tlt down{named}")


def down(session: SessionName = "default") -> None:
    """End a session; unfinished jobs resume when it is up again."""
    stop_session(session)
    stop_dashboard(session)
    say(f"session '{session}' is down")


def status(
    session: SessionName = "default",
    json: Json = False,
) -> None:
    """Show the workers and jobs of a session."""
    spec = find_session(session)

    async def fetch(client: Client) -> tuple[dict[WorkerId, Heartbeat], list[JobRecord]]:
        return await client.workers(), await client.jobs.all()

    workers, records = with_client(session, fetch)
    if json:
        jobs = [{"job": r.job, "status": r.status, "error": r.error} for r in records]
        print_json(
            {
                "session": msgspec.structs.replace(spec, redis_url=hide_password(spec.redis_url)),
                "workers": workers,
                "jobs": jobs,
            }
        )
        return
    say(f"session '{session}' is up: redis {hide_password(spec.redis_url)}, runs {spec.runs}")
    print_table(
        ("worker", "incarnation", "running", "job", "process", "ranks"),
        [
            (
                name,
                str(beat.incarnation),
                str(beat.running),
                beat.job or "-",
                str(beat.pid),
                " ".join(map(str, beat.rank_pids)) or "starting",
            )
            for name, beat in workers.items()
        ],
    )
    waiting = [record for record in records if record.status in ("queued", "preparing", "running")]
    say(f"{len(waiting)} of {len(records)} jobs have not ended; `tlt jobs` lists them")
