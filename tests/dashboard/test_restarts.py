"""Attempts and losses of jobs are counted from the session's journal, read at once or in parts."""

from pathlib import Path

import msgspec

from tests.samples import SPEC
from tlt.base.id_types import Epoch, Incarnation, JobId, WorkerId
from tlt.dashboard.job_attempt_counts import JobRestarts
from tlt.protocol.commands import EndJob
from tlt.protocol.events import (
    AnyEvent,
    JobPrepared,
    JobSubmitted,
    SessionResumed,
    WorkerJoined,
    WorkerLost,
)
from tlt.protocol.shared_values import Prepared, WorkerInfo
from tlt.store.journal import START, Journal

ONE, TWO = JobId("job-1"), JobId("job-2")


def resumed(epoch: int) -> SessionResumed:
    return SessionResumed(epoch=Epoch(epoch), blobs_kept=True)


def joined(incarnation: int) -> WorkerJoined:
    info = WorkerInfo(
        worker=WorkerId("w0"),
        incarnation=Incarnation(incarnation),
        ranks=1,
        host="host",
        rendezvous="127.0.0.1:1",
    )
    return WorkerJoined(info=info)


def lost(incarnation: int) -> WorkerLost:
    return WorkerLost(
        worker=WorkerId("w0"),
        incarnation=Incarnation(incarnation),
        reason="killed",
        returning=True,
    )


def submitted(job: JobId) -> JobSubmitted:
    return JobSubmitted(job=job, spec=SPEC, folder=f"/runs/{job}")


def prepared(job: JobId) -> JobPrepared:
    return JobPrepared(job=job, prepared=Prepared(train_prompts=8, eval_prompts=0))


EVENTS: list[AnyEvent] = [
    resumed(1),
    joined(1),
    submitted(ONE),
    submitted(TWO),
    resumed(2),  # the job is still in preparation, which is no attempt
    prepared(ONE),
    prepared(ONE),
    lost(1),
    lost(1),
    joined(2),
    resumed(3),
    EndJob(job=ONE, status="done", error=None),
    lost(2),
    prepared(TWO),
    resumed(4),
    resumed(5),
]


def test_counts_attempts_and_losses_of_the_running_job(tmp_path: Path) -> None:
    journal = Journal(tmp_path, START)
    restarts = JobRestarts(tmp_path)
    for number, event in enumerate(EVENTS):
        journal.append([(float(number), event, ())])
        restarts.update()
    journal.close()
    late = JobRestarts(tmp_path)
    late.update()
    for each in (restarts, late):
        assert each.attempts == {ONE: 2, TWO: 3}
        assert each.losses[ONE] == 1
        assert each.losses[TWO] == 0


def test_missing_or_broken_journal_counts_nothing(tmp_path: Path) -> None:
    restarts = JobRestarts(tmp_path)
    restarts.update()
    (tmp_path / "journal.jsonl").write_bytes(msgspec.json.encode({"seq": 5}) + b"\n")
    restarts.update()
    assert not restarts.attempts
