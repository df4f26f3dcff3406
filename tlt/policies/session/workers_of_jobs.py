"""Assign a session's workers to its jobs, each to one job at most.

A job that asks for a number of workers has them while it is prepared and runs. One that asks for
none runs alone and has all, those that join later too. A lost worker stays with its job, unless a
free one takes its place first; one that is starting fresh ranks is waited for.
"""

from collections import deque

from tlt.base.id_types import JobId, WorkerId
from tlt.policies.session.session_state import SessionState, change_job
from tlt.protocol.commands import AssignWorker
from tlt.protocol.shared_values import WorkerInfo


def owner_of(state: SessionState, worker: WorkerId) -> JobId | None:
    """Return the job that has this worker, be it lost or alive."""
    owners = (
        job for job, entry in state.in_hand.items() if entry.runs_alone or worker in entry.workers
    )
    return next(owners, None)


def living_workers(state: SessionState, job: JobId) -> tuple[WorkerInfo, ...]:
    entry = state.jobs[job]
    if entry.runs_alone:
        return tuple(state.workers.values())
    return tuple(state.workers[worker] for worker in entry.workers if worker in state.workers)


def take_workers(state: SessionState, job: JobId) -> SessionState | None:
    """Give a waiting job its workers; return None if too few are free."""
    asked = state.jobs[job].spec.workers.asked
    if asked is None:
        return None if state.in_hand else state
    free = _free_workers(state)
    return None if len(free) < asked else change_job(state, job, workers=tuple(free[:asked]))


def replace_lost(state: SessionState) -> tuple[SessionState, list[AssignWorker]]:
    """Let free workers take the places of lost ones, but not in a job that is being paused."""
    commands: list[AssignWorker] = []
    free = deque(_free_workers(state))
    for job, entry in state.in_hand.items():
        if entry.pause is not None:
            continue
        lost = [worker for worker in entry.workers if _is_gone(state, worker)]
        replaced = dict(zip(lost, list(free), strict=False))
        for _ in replaced:
            free.popleft()
        if replaced:
            workers = tuple(replaced.get(worker, worker) for worker in entry.workers)
            state = change_job(state, job, workers=workers)
        if entry.status == "running":
            commands += [
                AssignWorker(job=job, info=state.workers[worker]) for worker in replaced.values()
            ]
    return state, commands


def _is_gone(state: SessionState, worker: WorkerId) -> bool:
    return worker not in state.workers and worker not in state.returning_workers


def _free_workers(state: SessionState) -> list[WorkerId]:
    """Return the living workers that no job has, those of a host together."""
    free = [info for info in state.workers.values() if owner_of(state, info.worker) is None]
    free.sort(key=lambda info: (info.host, len(info.worker), info.worker))
    return [info.worker for info in free]
