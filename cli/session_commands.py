"""tlt up, down, status: start, end and show a session."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cli.arguments import Json, Runs, SessionName, Workers
from cli.dashboard import start_dashboard, stop_dashboard
from cli.output import complain, print_json, print_table, say
from tlt.base.human_format import seconds
from tlt.base.id_types import WorkerId
from tlt.doctor.all_checks import check_machine
from tlt.doctor.cuda_devices import CudaState, read_cuda_state
from tlt.doctor.findings import Finding
from tlt.errors import ConfigError, StoreError
from tlt.protocol.shared_values import Heartbeat, JobRecord, ServiceHeartbeat
from tlt.session.client import Client, with_client
from tlt.session.cluster_plan import ClusterOptions
from tlt.session.control import (
    find_session,
    new_session,
    session_option,
    start_session,
    stop_session,
)
from tlt.session.fault_log import describe_fault, read_supervised
from tlt.session.session_process_states import Liveness, actor_liveness, supervised_liveness
from tlt.session.wait_description import describe_pause, describe_wait, first_waiting
from tlt.spec.config import SessionSpec
from tlt.store.job_requests import ENDED_STATUSES
from tlt.store.redis_connection import hide_password
from tlt.store.redis_memory import RedisMemory


def choose_cuda_workers(workers: int | None, ranks: int, runs: Path, redis_url: str | None) -> int:
    """Return the number of workers: as many as there are devices for, unless it is given."""
    cuda = read_cuda_state()
    findings = check_machine(runs, cuda, wants_cuda=True)
    if redis_url is not None:
        findings = [finding for finding in findings if finding.subject != "redis-server"]
    _refuse_missing(findings)
    for finding in findings:
        if finding.status == "warning":
            complain(f"warning: {_describe(finding)}")
    return _fitting_workers(workers, ranks, cuda)


def _refuse_missing(findings: list[Finding]) -> None:
    missing = [_describe(finding) for finding in findings if finding.status == "missing"]
    if missing:
        raise ConfigError(f"--device cuda: {'; '.join(missing)} (`tlt doctor` shows all)")


def _fitting_workers(workers: int | None, ranks: int, cuda: CudaState) -> int:
    devices = len(cuda.devices)
    most = devices // ranks
    if most == 0:
        raise ConfigError(f"--ranks {ranks}: a worker needs a device a rank; there are {devices}")
    if workers is not None and workers > most:
        raise ConfigError(
            f"--workers {workers} --ranks {ranks}: they need {workers * ranks} devices, "
            f"and there are {devices}"
        )
    return most if workers is None else workers


def _describe(finding: Finding) -> str:
    advice = f" ({finding.advice})" if finding.advice else ""
    return f"{finding.subject}: {finding.found}{advice}"


_Services = dict[str, ServiceHeartbeat]
_Workers = Mapping[WorkerId, Heartbeat]


def up(
    workers: Workers = None,
    ranks: Annotated[
        int, typer.Option(min=1, help="Ranks (compute processes) of each worker.")
    ] = 1,
    redis_url: Annotated[
        str | None,
        typer.Option(
            envvar="TLT_REDIS_URL",
            help="redis://, rediss:// or unix:// URL; by default the session starts its own.",
        ),
    ] = None,
    runs: Runs = Path("runs"),
    blobs: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Path or URL (s3://BUCKET/FOLDER) for checkpoints and other committed files; "
            "by default they are in the folders of the runs.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = "cpu",
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Join the Ray cluster at this address, and use all of its hosts; "
            "by default the session starts its own Ray, on this host.",
        ),
    ] = None,
    workers_per_host: Annotated[
        int | None,
        typer.Option(min=1, help="Workers on each host; by default as many as it has devices for."),
    ] = None,
    runtime_env: Annotated[
        Path | None,
        typer.Option(help="JSON or YAML file with a runtime environment of Ray, for all hosts."),
    ] = None,
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
    if device == "cuda" and ray is None:
        workers = choose_cuda_workers(workers, ranks, runs, redis_url)
    joined = None
    if ray is not None:
        joined = ClusterOptions(
            address=ray, workers_per_host=workers_per_host, runtime_env=runtime_env
        )
        if workers is not None:
            raise ConfigError("--workers: with --ray, write --workers-per-host")
    elif workers_per_host is not None or runtime_env is not None:
        raise ConfigError("--workers-per-host and --runtime-env need --ray")
    spec = new_session(
        session,
        cluster=joined,
        workers=workers,
        ranks=ranks,
        redis_url=redis_url,
        runs=runs,
        blobs=blobs,
        device=device,
        lease_seconds=lease_seconds,
        reward_workers=reward_workers,
    )
    pid = start_session(spec)
    named = session_option(session)
    hosts = "" if spec.cluster is None else f" on {spec.cluster.hosts} hosts"
    say(f"session '{session}' is up: {spec.workers} workers{hosts}, process {pid}")
    say(f"  redis  {hide_password(spec.redis_url)}")
    say(f"  runs   {spec.runs}")
    if spec.blobs is not None:
        say(f"  blobs  {spec.blobs}")
    say(f"  logs   {spec.folder}/logs")
    address = start_dashboard(session) if dashboard else None
    if address is not None:
        say(f"  page   {address}")
    say(f"next:    tlt submit configs/tiny-reasoner.yaml --wait{named}")
    say(f"         tlt status{named}")
    say(f"         tlt down{named}")


def down(session: SessionName = "default") -> None:
    """End a session; unfinished jobs resume when it is up again."""
    try:
        was_up = stop_session(session)
    finally:
        stop_dashboard(session)
    left = "" if was_up else " already; what its processes had left is removed"
    say(f"session '{session}' is down{left}")


def status(
    session: SessionName = "default",
    json: Json = False,
) -> None:
    """Show the processes of a session, the faults that it heals, and how many jobs wait."""
    spec = find_session(session)
    supervised = read_supervised(Path(spec.folder))
    if not json:
        blobs = "" if spec.blobs is None else f", blobs {spec.blobs}"
        redis = hide_password(spec.redis_url)
        say(f"session '{session}' is up: redis {redis}, runs {spec.runs}{blobs}")
        for fault in supervised.recent(time.time()):
            say(describe_fault(fault, time.time()))

    async def fetch(client: Client) -> tuple[_Services, _Workers, list[JobRecord], RedisMemory]:
        return (
            await client.services(),
            await client.workers(),
            await client.jobs.all(),
            await client.memory(),
        )

    own = list(supervised_liveness(supervised))
    try:
        services, workers, records, memory = with_client(session, fetch)
    except StoreError:
        if not json:
            _print_processes(own, {})
        raise
    processes = own + list(actor_liveness(spec, services, workers, supervised, time.time()))
    if json:
        fields = ("job", "status", "error", "pause")
        jobs = [{field: getattr(record, field) for field in fields} for record in records]
        print_json(
            {
                "session": without_secrets(spec),
                "processes": processes,
                "faults": supervised.faults,
                "workers": workers,
                "jobs": jobs,
            }
        )
        return
    _print_processes(processes, workers)
    if (complaint := memory.complaint()) is not None:
        say(complaint)
    for name, service in services.items():
        if service.waiting is not None:
            say(f"the {name} waits: {service.waiting}")
    for record in records:
        if (why := describe_pause(record, time.time())) is not None:
            say(f"{record.job} is {why}")
    if (first := first_waiting(records)) is not None:
        why = describe_wait(first, records, spec.workers) or "starts next"
        say(f"{first.job} {why}")
    waiting = [record for record in records if record.status not in ENDED_STATUSES]
    say(f"{len(waiting)} of {len(records)} jobs have not ended; `tlt jobs` lists them")


def without_secrets(spec: SessionSpec) -> SessionSpec:
    """Leave out what a URL and the variables of a runtime environment may hold."""
    cluster = spec.cluster
    if cluster is not None:
        cluster = msgspec.structs.replace(cluster, runtime_env="{}")
    return msgspec.structs.replace(spec, redis_url=hide_password(spec.redis_url), cluster=cluster)


def _print_processes(processes: Sequence[Liveness], workers: _Workers) -> None:
    several_hosts = any(process.host for process in processes)

    def row(process: Liveness) -> tuple[str, ...]:
        beat = workers.get(WorkerId(process.name)) if process.pid else None
        age = process.silent_seconds
        return (
            process.name,
            process.state,
            str(process.pid or "-"),
            "-" if age is None else f"{seconds(age)} ago",
            " ".join(map(str, process.rank_pids)) or "-",
            "-" if beat is None else str(beat.incarnation),
            "-" if beat is None else str(beat.running),
            (beat and beat.job) or "-",
            *((process.host or "-",) if several_hosts else ()),
        )

    print_table(
        (
            *("name", "state", "process", "heartbeat", "ranks", "incarnation", "running", "job"),
            *(("host",) if several_hosts else ()),
        ),
        [row(process) for process in processes],
    )
