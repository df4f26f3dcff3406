"""Queue a job in a session, from the beginning or from another job's checkpoint."""

from pathlib import Path
from typing import NamedTuple

from tlt.base.id_types import Step
from tlt.errors import BlobLost, ConfigError
from tlt.protocol.refs import StartingCheckpoint
from tlt.protocol.shared_values import JobRecord
from tlt.runs.job_checkpoints import choose_checkpoint, keep_commit
from tlt.session.client import run_folder, with_client
from tlt.spec.config import JobSpec

_MOST_CHOICES = 5


class Place(NamedTuple):
    """A job's place in the queue."""

    # a job of a higher priority runs earlier
    priority: int = 0
    # a second submission with the same key returns the first one's job
    idempotency_key: str | None = None


_USUAL = Place()


def submit_job(
    session: str, spec: JobSpec, start: str | None = None, place: Place = _USUAL
) -> JobRecord:
    """Queue a job; `start` is JOB[@STEP], and JOB may be a run's folder."""
    if start is None:
        return _submit(session, spec, None, place)
    return _submit_from(session, spec, start, place)


def _submit(
    session: str, spec: JobSpec, start: StartingCheckpoint | None, place: Place
) -> JobRecord:
    return with_client(session, lambda client: client.jobs.submit(spec, start, *place))


def _submit_from(session: str, spec: JobSpec, start: str, place: Place) -> JobRecord:
    job, separator, step = start.rpartition("@")
    if not separator or not step.isdecimal():
        job, step = start, ""
    if spec.policy.hub_id is not None:
        spec = keep_commit(spec, run_folder(job, session))
    if (known := _submitted_before(session, spec, job, step, place.idempotency_key)) is not None:
        return known
    run = run_folder(job, session)
    for _ in range(_MOST_CHOICES):
        chosen = choose_checkpoint(run, Step(int(step)) if step else None, spec)
        try:
            return _submit(session, spec, chosen, place)
        except BlobLost:
            continue  # a job that runs has just replaced it by a newer one
    raise ConfigError(f"{start}: its checkpoints are replaced faster than they can be copied")


def _submitted_before(
    session: str, spec: JobSpec, job: str, step: str, key: str | None
) -> JobRecord | None:
    """Return the job that this key was used for: the checkpoint may be gone since."""
    if key is None:
        return None
    known = with_client(session, lambda client: client.jobs.submitted_with(key))
    if known is None:
        return None
    start = known.starts_from
    if (
        known.spec != spec
        or start is None
        or start.job != Path(job).name
        or (step and int(step) != start.checkpoint.version)
    ):
        raise ConfigError(f"the idempotency key '{key}' is that of {known.job}")
    return known
