"""tlt submit, retry, jobs, logs, pause, resume, cancel; none imports torch or ray."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from cli.arguments import From, JobName, Json, SessionName, Set, SpecFile
from cli.config import load_job
from cli.output import complain, print_json, print_table, say, say_outcome, timed_lines
from cli.progress import RunProgress
from cli.run_report import report_run
from tlt.base.id_types import WorkerId
from tlt.errors import ConfigError
from tlt.protocol.shared_values import Heartbeat, JobRecord
from tlt.runs.job_checkpoints import has_checkpoint, keep_commit
from tlt.runs.run_folder_reader import (
    follow_journal,
    has_journal,
    journal_entries,
    open_ledger,
    read_snapshot,
)
from tlt.session.client import Client, fetch_record, with_client
from tlt.session.job_submission import Place, submit_job
from tlt.session.wait_description import describe_pause, describe_wait, describe_workers, workers_of
from tlt.store.job_requests import ENDED_STATUSES
from tlt.store.journal import FILE_NAME

_POLL_SECONDS = 0.2


def pause(job: JobName, session: SessionName = "default") -> None:
    """Pause a job: its workers take the next job of the queue.

    Answers that it has finished stay; unfinished ones keep their tokens until it goes on, and an
    update of the policy starts over. A job that waits is held back.
    """

    async def request(client: Client) -> JobRecord:
        record = await client.job(job)
        await client.jobs.pause(record.job)
        return record

    record = with_client(session, request)
    while not _is_paused_by_user(record) and record.status not in ENDED_STATUSES:
        time.sleep(_POLL_SECONDS)
        record = fetch_record(session, job)
    if record.status in ENDED_STATUSES:
        say(f"{job} had ended already: {record.status}")
        return
    say(f"{job} is paused; next: tlt resume {job}")


def resume(job: JobName, session: SessionName = "default") -> None:
    """Let a paused job go on: it queues again, by its priority."""

    async def request(client: Client) -> JobRecord:
        record = await client.job(job)
        await client.jobs.resume(record.job)
        return record

    record = with_client(session, request)
    while record.status == "paused":
        time.sleep(_POLL_SECONDS)
        record = fetch_record(session, job)
    say(f"{job} is {record.status}; next: tlt logs {job} -f")


def _is_paused_by_user(record: JobRecord) -> bool:
    return record.pause is not None and record.pause.shortage is None


Wait = Annotated[bool, typer.Option("--wait", help="Follow the job until it ends.")]


def submit(
    spec: SpecFile,
    wait: Wait = False,
    changes: Set = None,
    start: From = None,
    priority: Annotated[
        int, typer.Option(help="Of the jobs that wait, one of the highest priority runs next.")
    ] = 0,
    idempotency_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Return the job that was submitted with this key before."),
    ] = None,
    session: SessionName = "default",
    json: Json = False,
) -> None:
    """Queue a job.

    With `--from` it goes on from what another job had learned: policy, optimiser, drafter, and the
    place in the prompts and in the learning rate's schedule. `algorithm.steps` then counts the
    steps of both jobs. The other job may have ended or still run, in this session or an earlier
    one. Settings and data may differ, the model may not.
    """
    loaded = load_job(spec, changes)
    record = submit_job(session, loaded, start, Place(priority, idempotency_key))
    _report_submitted(session, record, wait, json)


def retry(
    job: JobName, wait: Wait = False, session: SessionName = "default", json: Json = False
) -> None:
    """Submit a failed or cancelled job again, as a new job with the same spec.

    It starts from the last checkpoint; if there is none, from where the job started.
    """
    record = with_client(session, lambda client: client.job(job))
    if record.status not in ("failed", "cancelled"):
        advice = f"; `tlt submit SPEC --from {job}` goes on from it"
        raise ConfigError(f"{job} is {record.status}, neither failed nor cancelled{advice}")
    run = Path(record.folder)
    start = job if has_checkpoint(run) else _start_name(record)
    again = submit_job(session, keep_commit(record.spec, run), start, Place(record.priority))
    _report_submitted(session, again, wait, json)


def _report_submitted(session: str, record: JobRecord, wait: bool, json: bool) -> None:
    start = _start_name(record)
    if json:
        print_json({"job": record.job, "folder": record.folder, "from": start})
    else:
        origin = "" if start is None else f", from {start}"
        say(f"submitted {record.job}{origin} ({record.folder})")
    if wait:
        _wait(session, record, report=not json)
    elif not json:
        say(f"next: tlt logs {record.job} -f")


def _wait(session: str, record: JobRecord, report: bool) -> None:
    try:
        ended = watch(session, record)
    except KeyboardInterrupt:
        complain(f"detached; {record.job} runs on: `tlt logs {record.job} -f`")
        raise typer.Exit(130) from None
    folder = Path(ended.folder)
    if report and has_journal(folder):
        report_run(read_snapshot(folder), folder)
    if ended.status != "done":
        say_outcome(record.job, ended.status, ended.error)
        raise typer.Exit(1)


def watch(session: str, record: JobRecord) -> JobRecord:
    """Show a job's progress until it ends, and return its last record."""
    folder, job = Path(record.folder), record.job
    with RunProgress(job) as progress:
        while not _has_begun(record := fetch_record(session, job)):
            progress.show_status(record.status)
            time.sleep(_POLL_SECONDS)
        if not (folder / FILE_NAME).exists():
            return record
        ledger = open_ledger(folder)
        for entry in follow_journal(folder):
            if entry is not None:
                for line in timed_lines(ledger, entry):
                    progress.say(line)
                continue
            progress.show(ledger.snapshot())
            if record.status in ENDED_STATUSES:
                break
            # Fetched before the journal is read once more, so that no last line is missed.
            record = fetch_record(session, job)
    return record


def _has_begun(record: JobRecord) -> bool:
    """Return True if its journal exists, or never will."""
    waits = record.status in ("queued", "preparing", "paused")
    return not waits or (Path(record.folder) / FILE_NAME).exists()


def await_end(session: str, record: JobRecord) -> JobRecord:
    """Wait until a job ends, and return its last record."""
    while record.status not in ENDED_STATUSES:
        time.sleep(_POLL_SECONDS)
        record = fetch_record(session, record.job)
    return record


def _start_name(record: JobRecord) -> str | None:
    return None if record.starts_from is None else record.starts_from.name


def list_jobs(session: SessionName = "default", json: Json = False) -> None:
    """List all jobs of a session, oldest first."""

    async def fetch(client: Client) -> tuple[list[JobRecord], dict[WorkerId, Heartbeat], int]:
        return await client.jobs.all(), await client.workers(), client.session.workers

    records, heartbeats, workers = with_client(session, fetch)
    if json:
        fields = ("job", "status", "priority", "error", "pause", "submitted", "folder")
        print_json(
            [
                {field: getattr(record, field) for field in fields}
                | {
                    "from": _start_name(record),
                    "wait": describe_wait(record, records, workers),
                    "workers": workers_of(record, heartbeats),
                }
                for record in records
            ]
        )
        return
    print_table(
        ("job", "status", "priority", "workers", "submitted", "from", "folder", "why"),
        [
            (
                record.job,
                record.status,
                str(record.priority),
                describe_workers(record, heartbeats),
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.submitted)),
                _start_name(record) or "",
                record.folder,
                record.error
                or describe_pause(record, time.time())
                or describe_wait(record, records, workers)
                or "",
            )
            for record in records
        ],
    )


def logs(
    job: JobName,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Print new lines until the job ends.")
    ] = False,
    session: SessionName = "default",
    json: Annotated[bool, typer.Option("--json", help="Print the journal's entries.")] = False,
) -> None:
    """Print what happened in a job."""
    record = fetch_record(session, job)
    while follow and not _has_begun(record):
        time.sleep(_POLL_SECONDS)
        record = fetch_record(session, job)
    folder = Path(record.folder)
    if not (folder / FILE_NAME).exists():
        if not json:
            why = record.error or describe_pause(record, time.time())
            say(f"{job} is {record.status}" + (f": {why}" if why else ""))
        return
    ledger = open_ledger(folder)
    for entry in follow_journal(folder) if follow else journal_entries(folder):
        if entry is None:
            sys.stdout.flush()
            if record.status in ENDED_STATUSES:
                return
            record = fetch_record(session, job)
        elif json:
            print_json(entry)
        else:
            for line in timed_lines(ledger, entry):
                say(line)


def cancel(job: JobName, session: SessionName = "default") -> None:
    """End a job; what it has committed stays."""

    async def request(client: Client) -> JobRecord:
        record = await client.job(job)
        if record.status not in ENDED_STATUSES:
            await client.jobs.cancel(record.job)
        return record

    record = with_client(session, request)
    if record.status in ENDED_STATUSES:
        say(f"{job} had ended already: {record.status}")
        return
    while record.status not in ENDED_STATUSES:
        time.sleep(0.1)
        record = with_client(session, lambda client: client.job(job))
    say(f"{job} {record.status}")
