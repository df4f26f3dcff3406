"""Tell people what a queued job waits for, why one is paused, and which workers a job has."""

from collections.abc import Mapping, Sequence

from tlt.base.human_format import seconds
from tlt.base.id_types import WorkerId
from tlt.protocol.shared_values import Heartbeat, JobRecord
from tlt.store.job_requests import ENDED_STATUSES


def describe_pause(record: JobRecord, now: float) -> str | None:
    """Return None for a job that isn't paused."""
    if record.status != "paused" or record.pause is None:
        return None
    since = f"paused for {seconds(max(0.0, now - record.pause.since))}"
    if record.pause.shortage is not None:
        return f"{since}: {record.pause.shortage}"
    return f"{since}, until `tlt resume {record.job}`"


_MOST_NAMES = 4


def describe_wait(record: JobRecord, records: Sequence[JobRecord], workers: int) -> str | None:
    """Return None for a job that isn't queued; `workers` are those of the session."""
    first = first_waiting(records)
    if record.status != "queued" or first is None:
        return None
    if record.job != first.job:
        return f"waits behind {first.job}"
    in_hand = [each for each in records if each.status in ("preparing", "running")]
    alone = next((each for each in in_hand if each.spec.workers.asked is None), None)
    if alone is not None:
        return f"waits for {alone.job}, which has all workers"
    asked = record.spec.workers.asked
    if asked is None:
        others = ", ".join(each.job for each in in_hand)
        return f"asks for all workers, and waits for {others}" if others else None
    if asked > workers:
        return (
            f"asks for {asked} workers, and the session has {workers}: cancel it, or start the "
            f"session with `tlt up --workers {asked}`"
        )
    free = max(0, workers - sum(each.spec.workers.asked or 0 for each in in_hand))
    if free < asked:
        return f"asks for {asked} workers, of which {free} {'is' if free == 1 else 'are'} free"
    return f"asks for {asked} workers, and waits until they have started"


def first_waiting(records: Sequence[JobRecord]) -> JobRecord | None:
    """Return the queued job that starts next; the others wait with it."""
    queued = sorted(
        (record for record in records if record.status == "queued"),
        key=lambda record: (-record.priority, record.submitted),
    )
    return next(iter(queued), None)


def describe_workers(record: JobRecord, heartbeats: Mapping[WorkerId, Heartbeat]) -> str:
    """Name the workers that a job has, or say how many it asks for; nothing of an ended one."""
    if record.status in ENDED_STATUSES:
        return ""
    if own := workers_of(record, heartbeats):
        return " ".join(own) if len(own) <= _MOST_NAMES else f"{own[0]} … {own[-1]} ({len(own)})"
    asked = record.spec.workers.asked
    return "asks for all" if asked is None else f"asks for {asked}"


def workers_of(record: JobRecord, heartbeats: Mapping[WorkerId, Heartbeat]) -> list[WorkerId]:
    """Return the workers that have opened a running job."""
    if record.status != "running":
        return []
    own = [worker for worker, beat in heartbeats.items() if beat.job == record.job]
    return sorted(own, key=lambda worker: (len(worker), worker))
