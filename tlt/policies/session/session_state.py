"""The state of a session: its jobs that have not ended, and its workers."""

import msgspec

from tlt.base.id_types import Epoch, Incarnation, JobId, JobStatus, WorkerId
from tlt.protocol.refs import StartingCheckpoint
from tlt.protocol.shared_values import Pause, Prepared, WorkerInfo
from tlt.spec.config import JobSpec

_IN_HAND: frozenset[JobStatus] = frozenset({"preparing", "running"})


class Job(msgspec.Struct, frozen=True, kw_only=True):
    spec: JobSpec
    folder: str
    status: JobStatus = "queued"
    starts_from: StartingCheckpoint | None = None
    priority: int = 0
    # its run has begun, and may go on without another preparation
    started: bool = False
    # None until it is prepared
    prepared: Prepared | None = None
    # it is paused, or will be once its workers are free
    pause: Pause | None = None
    # its own workers while it is in hand, lost ones included; none if it has all of the session
    workers: tuple[WorkerId, ...] = ()

    @property
    def in_hand(self) -> bool:
        """Return True while it has workers: while it is prepared or runs."""
        return self.status in _IN_HAND

    @property
    def runs_alone(self) -> bool:
        return self.spec.workers.asked is None


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    epoch: Epoch = Epoch(0)
    # jobs that have not ended, in the order of submission
    jobs: dict[JobId, Job] = {}
    # all jobs that were ever submitted
    submitted_jobs: frozenset[JobId] = frozenset()
    workers: dict[WorkerId, WorkerInfo] = {}
    newest_incarnations: dict[WorkerId, Incarnation] = {}
    # lost workers that are starting fresh ranks
    returning_workers: frozenset[WorkerId] = frozenset()

    @property
    def in_hand(self) -> dict[JobId, Job]:
        """Return the jobs that are prepared or run."""
        return {job: entry for job, entry in self.jobs.items() if entry.in_hand}


def change_job(state: SessionState, job: JobId, **changes: object) -> SessionState:
    jobs = {**state.jobs, job: msgspec.structs.replace(state.jobs[job], **changes)}
    return msgspec.structs.replace(state, jobs=jobs)
