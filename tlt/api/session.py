"""Sessions and their jobs, as Python objects."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from tlt.api.discard_unnamed_inputs import discard_unnamed, locked_folder
from tlt.api.job_description import Job
from tlt.base.id_types import JobStatus, Step
from tlt.errors import ConfigError, TltError
from tlt.protocol.shared_values import JobRecord
from tlt.report import Snapshot
from tlt.report.evaluation_figures import EvalSummary
from tlt.report.ledger_figure_types import StepSummary
from tlt.runs.run_answers import AnswerRow, read_answers
from tlt.runs.run_folder_reader import follow_journal, has_journal, open_ledger, read_ledger
from tlt.session.client import fetch_record, with_client
from tlt.session.control import find_session, new_session, start_session, stop_session
from tlt.session.job_submission import Place, submit_job
from tlt.spec.config import JobSpec, SessionSpec
from tlt.spec.evaluation_job import evaluation_job
from tlt.store.job_requests import ENDED_STATUSES

_POLL_SECONDS = 0.2


class JobFailed(TltError):
    """A job failed or was cancelled."""


class Run:
    """A job that was submitted. Iterating over it gives its steps as they end."""

    def __init__(self, session: str, record: JobRecord) -> None:
        self.name = str(record.job)
        self.folder = Path(record.folder)
        self._session = session

    def __repr__(self) -> str:
        return f"Run({self.name!r}, {self.status!r})"

    @property
    def status(self) -> JobStatus:
        return self._record().status

    def __iter__(self) -> Iterator[StepSummary]:
        return self.steps()

    def steps(self) -> Iterator[StepSummary]:
        """Yield each step once its policy is published; raise JobFailed if the job fails."""
        given = 0
        for snapshot in self._snapshots():
            ended = [step for step in snapshot.steps if step.metrics is not None]
            yield from ended[given:]
            given = len(ended)
        self._raise_if_failed()

    def result(self) -> "Run":
        """Wait until the job has ended; raise JobFailed if it failed."""
        for _ in self._snapshots():
            pass
        self._raise_if_failed()
        return self

    def snapshot(self) -> Snapshot:
        """Return all figures up to now: steps, evaluations, speculation, drafter, times."""
        if not has_journal(self.folder):
            raise ConfigError(f"{self.name} has not begun")
        return read_ledger(self.folder).snapshot()

    @property
    def evaluations(self) -> list[EvalSummary]:
        """Return all evaluations up to now, each with the figures of every set."""
        return list(self.snapshot().evals)

    def answers(
        self, *, held_out: bool = False, step: int | None = None, only: str | None = None
    ) -> list[AnswerRow]:
        """Return a step's answers with their texts and rewards, by default of the last one.

        `only` names an evaluation set.
        """
        only_evaluates = self._record().spec.algorithm.steps == 0
        purpose = "eval" if held_out or only is not None or only_evaluates else "train"
        return list(read_answers(self.folder, purpose, None if step is None else Step(step), only))

    def cancel(self) -> None:
        """Ask the session to end the job."""
        with_client(self._session, lambda client: client.jobs.cancel(self._record().job))

    def pause(self) -> None:
        """Ask the session to pause the job, so that its workers take the next one."""
        with_client(self._session, lambda client: client.jobs.pause(self._record().job))

    def resume(self) -> None:
        """Ask the session to let the paused job go on, by its priority."""
        with_client(self._session, lambda client: client.jobs.resume(self._record().job))

    def export(self, folder: str | Path, *, best: bool = False) -> Path:
        """Write the policy as a folder that Transformers and SGLang load."""
        from tlt.runs.export.policy_export import export_policy

        ledger = read_ledger(self.folder)
        snapshot = ledger.snapshot()
        stored = snapshot.best if best else snapshot.last
        if stored is None:
            raise ConfigError(f"{self.name}: {'no best' if best else 'no checkpointed'} policy yet")
        export_policy(self.folder, ledger, stored, Path(folder))
        return Path(folder)

    def _record(self) -> JobRecord:
        return fetch_record(self._session, self.name)

    def _snapshots(self) -> Iterator[Snapshot]:
        """Yield the figures whenever the journal has grown, and at last those of the end."""
        record = self._record()
        while record.status in ("queued", "preparing", "paused") and not has_journal(self.folder):
            time.sleep(_POLL_SECONDS)
            record = self._record()
        if not has_journal(self.folder):
            return
        ledger, grown = open_ledger(self.folder), False
        for entry in follow_journal(self.folder):
            if entry is not None:
                ledger.add(entry.event, entry.at)
                grown = True
                continue
            if grown:
                yield ledger.snapshot()
            grown = False
            if record.status in ENDED_STATUSES:
                return
            # fetched before the journal is read once more, so that no last entry is missed
            record = self._record()

    def _raise_if_failed(self) -> None:
        record = self._record()
        if record.status != "done":
            raise JobFailed(f"{self.name} {record.status}: {record.error or 'by request'}")


class OpenSession:
    """A session that is up, whoever started it."""

    def __init__(self, spec: SessionSpec) -> None:
        self._spec = spec

    @property
    def name(self) -> str:
        return self._spec.name

    def submit(
        self,
        job: Job | str | Path,
        *,
        from_job: Run | str | Path | None = None,
        step: int | None = None,
        priority: int = 0,
        idempotency_key: str | None = None,
    ) -> Run:
        """Queue a job, or a spec's YAML file.

        With `from_job`, a job or a run's folder, it goes on from that one's last checkpoint or from
        the one after `step` steps, as `tlt submit --from JOB@STEP` does.
        """
        place = Place(priority, idempotency_key)
        return self._submit(_as_job(job).to_spec, _start(from_job, step), place)

    def run(
        self,
        job: Job | str | Path,
        *,
        from_job: Run | str | Path | None = None,
        step: int | None = None,
    ) -> Run:
        """Queue a job and wait until it has ended."""
        return self.submit(job, from_job=from_job, step=step).result()

    def evaluate(self, job: Job | str | Path, policy: str | Path | None = None) -> Run:
        """Evaluate a model folder, by default the job's policy, on the job's held-out sets.

        `evaluations` of what it returns has the figures, `answers` the texts.
        """
        model, wanted = None if policy is None else Path(policy), _as_job(job)
        return self._submit(
            lambda inputs: evaluation_job(wanted.to_spec(inputs), "tlt.Job", model), None, Place()
        ).result()

    def _submit(self, make_spec: Callable[[Path], JobSpec], start: str | None, place: Place) -> Run:
        """Queue the job whose spec is made with a folder for its inputs."""
        with locked_folder(Path(self._spec.runs)) as folder:
            record = submit_job(self.name, make_spec(folder), start, place)
            records, complaint = with_client(self.name, lambda client: client.jobs.readable())
            if complaint is None:
                discard_unnamed(folder, records)
        return Run(self.name, record)

    def jobs(self) -> list[Run]:
        """Return all jobs, oldest first."""
        records = with_client(self.name, lambda client: client.jobs.all())
        return [Run(self.name, record) for record in records]

    def job(self, name: str) -> Run:
        return Run(self.name, with_client(self.name, lambda client: client.job(name)))


def _as_job(job: Job | str | Path) -> Job:
    return job if isinstance(job, Job) else Job(job)


def _start(job: Run | str | Path | None, step: int | None) -> str | None:
    """Return where a job starts in the words of `tlt submit --from`."""
    if job is None:
        if step is not None:
            raise ConfigError("step names a checkpoint of from_job, which isn't given")
        return None
    name = str(job.folder) if isinstance(job, Run) else str(job)
    return name if step is None else f"{name}@{step}"


class Session(OpenSession):
    """A session that ends with the `with` block, or with the program.

    `tlt top` and the other commands see it under its name.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        workers: int | None = None,
        ranks: int = 1,
        device: str = "cpu",
        runs: str | Path = "runs",
        blobs: str | None = None,
        redis_url: str | None = None,
        lease_seconds: float = 15.0,
        reward_workers: int = 8,
    ) -> None:
        spec = new_session(
            name,
            workers=workers,
            ranks=ranks,
            redis_url=redis_url,
            runs=Path(runs),
            blobs=blobs,
            device=device,
            lease_seconds=lease_seconds,
            reward_workers=reward_workers,
        )
        super().__init__(spec)
        start_session(spec, ends_with_us=True)
        self._up = True

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session; its runs stay."""
        if self._up:
            self._up = False
            stop_session(self.name)


def connect(name: str = "default") -> OpenSession:
    """Return a session that is up, as `tlt up` starts it; raise NoSession if there is none."""
    return OpenSession(find_session(name))
