"""tlt submit, tlt jobs, tlt logs, tlt cancel. None of them imports torch or ray."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from cli.arguments import JobName, Json, SessionName, Set, SpecFile
from cli.output import complain, print_json, print_table, say
from cli.progress import RunProgress
from cli.session_client import Client, with_client
from cli.spec_loading import load_job
from tlt.errors import StoreError
from tlt.protocol.records import JobRecord
from tlt.report.log_lines import Narrator
from tlt.run_folder import follow_journal, journal_entries, open_ledger
from tlt.store.job_records import ENDED
from tlt.store.journal import FILE_NAME

_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 30.0


def submit(
    spec: SpecFile,
    wait: Annotated[bool, typer.Option("--wait", help="Follow it until it has ended.")] = False,
    changes: Set = None,
    session: SessionName = "default",
    json: Json = False,
) -> None:
    """Queue a job."""
    loaded = load_job(spec, changes)
    record = with_client(session, lambda client: client.jobs.submit(loaded))
    if json:
        print_json({"job": record.job, "folder": record.folder})
    else:
        say(f"submitted {record.job} ({record.folder})")
    if wait:
        _wait(session, record)
    elif not json:
        say(f"next: tlt logs {record.job} -f")


def _wait(session: str, record: JobRecord) -> None:
    try:
        ended = watch(session, record)
    except KeyboardInterrupt:
        complain(f"detached; {record.job} runs on: `tlt logs {record.job} -f`")
        raise typer.Exit(130) from None
    if ended.status != "done":
        complain(f"{record.job} {ended.status}" + (f": {ended.error}" if ended.error else ""))
        raise typer.Exit(1)


def watch(session: str, record: JobRecord) -> JobRecord:
    """Show a job's progress until it has ended; returns what became of it."""
    folder, name = Path(record.folder), record.job

    def look() -> JobRecord:
        return _patiently(session, name)

    with RunProgress(name) as progress:
        while (now := look()).status in ("queued", "preparing"):
            progress.waiting(now.status)
            time.sleep(_POLL_SECONDS)
        if not (folder / FILE_NAME).exists():
            return now
        narrator = Narrator(open_ledger(folder))
        for entry in follow_journal(folder):
            if entry is not None:
                for line in narrator.tell(entry.event, entry.at):
                    progress.line(line)
                continue
            progress.show(narrator.ledger.snapshot())
            if now.status in ENDED:
                break
            # Looked at before the journal is read once more, so that no last line is missed.
            now = look()
    return now


def _patiently(session: str, job: str) -> JobRecord:
    """A Redis that died is back within a moment."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return with_client(session, lambda client: client.job(job))
        except StoreError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def list_jobs(session: SessionName = "default", json: Json = False) -> None:
    """All jobs of a session, oldest first."""
    records = with_client(session, lambda client: client.jobs.all())
    if json:
        print_json(
            [
                {
                    "job": r.job,
                    "status": r.status,
                    "error": r.error,
                    "submitted": r.submitted,
                    "folder": r.folder,
                }
                for r in records
            ]
        )
        return
    print_table(
        ("job", "status", "submitted", "folder", "error"),
        [
            (
                record.job,
                record.status,
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.submitted)),
                record.folder,
                record.error or "",
            )
            for record in records
        ],
    )


def logs(
    job: JobName,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Until it has ended.")] = False,
    session: SessionName = "default",
    json: Annotated[bool, typer.Option("--json", help="The journal's entries.")] = False,
) -> None:
    """What happened in a job."""

    def look() -> JobRecord:
        return _patiently(session, job)

    record = look()
    while follow and record.status in ("queued", "preparing"):
        time.sleep(_POLL_SECONDS)
        record = look()
    folder = Path(record.folder)
    if not (folder / FILE_NAME).exists():
        if json:
            return  # no entries
        say(f"{job} is {record.status}" + (f": {record.error}" if record.error else ""))
        return
    narrator = Narrator(open_ledger(folder))
    for entry in follow_journal(folder) if follow else journal_entries(folder):
        if entry is None:
            sys.stdout.flush()
            if record.status in ENDED:
                return
            record = look()
            continue
        lines = narrator.tell(entry.event, entry.at)
        if json:
            print_json(entry)
        else:
            for line in lines:
                say(line)


def cancel(
    job: JobName,
    session: SessionName = "default",
) -> None:
    """End a job; what it has committed stays."""

    async def ask(client: Client) -> JobRecord:
        record = await client.job(job)
        if record.status not in ENDED:
            await client.jobs.cancel(record.job)
        return record

    record = with_client(session, ask)
    if record.status in ENDED:
        say(f"{job} had ended already: {record.status}")
        return
    while record.status not in ENDED:
        time.sleep(0.1)
        record = with_client(session, lambda client: client.job(job))
    say(f"{job} {record.status}")
