"""Queue a job in a session, from the beginning or from another job's checkpoint."""

from tlt.config import JobSpec
from tlt.errors import BlobLost, ConfigError
from tlt.id_types import Step
from tlt.job_checkpoints import choose_checkpoint
from tlt.protocol.refs import StartingCheckpoint
from tlt.protocol.shared_values import JobRecord
from tlt.session_client import run_folder, with_client

_MOST_CHOICES = 5


def submit_job(session: str, spec: JobSpec, start: str | None = None) -> JobRecord:
    """Queue a job; `start` is JOB[@STEP], and JOB may be a run's folder."""
    return _submit(session, spec) if start is None else _submit_from(session, spec, start)


def _submit(session: str, spec: JobSpec, start: StartingCheckpoint | None = None) -> JobRecord:
    return with_client(session, lambda client: client.jobs.submit(spec, start))


def _submit_from(session: str, spec: JobSpec, start: str) -> JobRecord:
    job, separator, step = start.rpartition("@")
    if not separator or not step.isdecimal():
        job, step = start, ""
    run = run_folder(job, session)
    for _ in range(_MOST_CHOICES):
        chosen = choose_checkpoint(run, Step(int(step)) if step else None, spec)
        try:
            return _submit(session, spec, chosen)
        except BlobLost:
            continue  # a job that runs has just replaced it by a newer one
    raise ConfigError(f"{start}: its checkpoints are replaced faster than they can be copied")
