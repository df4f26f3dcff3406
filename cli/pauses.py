"""tlt pause, resume: commands that import neither torch nor ray."""

import time

from cli.arguments import JobName, SessionName
from cli.output import say
from tlt.protocol.shared_values import JobRecord
from tlt.session.client import Client, fetch_record, with_client
from tlt.store.jobs import ENDED_STATUSES

_POLL_SECONDS = 0.1


def pause(job: JobName, session: SessionName = "default") -> None:
    """Pause a job: its workers take the next job of the queue.

    Answers that it has finished stay; unfinished ones are written again when it goes on, and an
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
