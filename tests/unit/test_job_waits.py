"""`tlt jobs` says of each queued job what it waits for."""

import msgspec
import pytest
from msgspec import UNSET, UnsetType

from tests.simulation.specs import small_spec
from tlt.base.id_types import Incarnation, JobId, JobStatus, WorkerId
from tlt.protocol.shared_values import Heartbeat, JobRecord
from tlt.session.wait_description import describe_wait, describe_workers
from tlt.store.job_requests import new_record


def record(
    name: str, workers: int | UnsetType, status: JobStatus = "queued", *, priority: int = 0
) -> JobRecord:
    made = new_record(JobId(name), small_spec(workers=workers), "/runs", None, priority)
    return msgspec.structs.replace(made, status=status)


def waits(*records: JobRecord, workers: int = 3) -> list[str | None]:
    return [describe_wait(each, records, workers) for each in records]


def test_names_what_the_first_waits_for_and_whom_the_others_wait_behind() -> None:
    running = record("a", 1, "running"), record("b", 1, "preparing")
    assert waits(*running, record("c", 2), record("d", 1)) == [
        None,
        None,
        "asks for 2 workers, of which 1 is free",
        "waits behind c",
    ]
    assert waits(*running, record("c", 2), record("d", UNSET, priority=1)) == [
        None,
        None,
        "waits behind d",
        "asks for all workers, and waits for a, b",
    ]


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ((record("a", UNSET, "running"),), "waits for a, which has all workers"),
        ((record("a", 1, "paused"),), "asks for 2 workers, and waits until they have started"),
        ((), "asks for 2 workers, and waits until they have started"),
    ],
)
def test_says_what_a_single_job_waits_for(records: tuple[JobRecord, ...], why: str) -> None:
    assert waits(*records, record("z", 2))[-1] == why


def test_a_job_that_can_never_start_is_told_what_to_do() -> None:
    """The session was started again with fewer workers."""
    (why,) = waits(record("a", 3), workers=2)
    assert why is not None
    assert "asks for 3 workers, and the session has 2" in why
    assert "tlt up --workers 3" in why


def test_lists_the_workers_that_have_opened_the_job() -> None:
    beats = {WorkerId(f"w{n}"): heartbeat(JobId("a" if n % 2 else "b")) for n in range(12)}
    assert describe_workers(record("a", 6, "running"), beats) == "w1 … w11 (6)"
    beats = {worker: beats[worker] for worker in (WorkerId("w9"), WorkerId("w1"), WorkerId("w2"))}
    assert describe_workers(record("a", 2, "running"), beats) == "w1 w9"
    assert describe_workers(record("c", 2), beats) == "asks for 2"
    assert describe_workers(record("c", UNSET, "preparing"), beats) == "asks for all"
    assert describe_workers(record("a", 2, "done"), beats) == ""


def heartbeat(job: JobId) -> Heartbeat:
    return Heartbeat(
        incarnation=Incarnation(1), counter=1, progress=0, running=0, pid=1, rank_pids=(2,), job=job
    )
