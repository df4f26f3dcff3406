"""The runs that are open: their states, their folders, and the logs of those that run now."""

from collections.abc import Iterable
from pathlib import Path

from tlt.actors.coordinator.logger_and_summary_processes import LoggerProcesses
from tlt.actors.coordinator.redis_effects import Effects
from tlt.base.id_types import JobId
from tlt.base.json_logs import serve_runs
from tlt.blobs.answer_files import AnswerFiles
from tlt.blobs.blob_files import Blobs, blobs_of_run
from tlt.policies.run import coordinator
from tlt.policies.run.run_state import Phase, RunState
from tlt.spec.config import JobSpec, SessionSpec
from tlt.store.journal_replayed_state import DeciderState


class OpenRuns:
    def __init__(self, spec: SessionSpec, effects: Effects) -> None:
        self.states: dict[JobId, DeciderState[RunState]] = {}
        self._spec = spec
        self._effects = effects
        self._loggers = LoggerProcesses()
        # the jobs to whose logs this process writes, too
        self._logged: frozenset[JobId] = frozenset()

    async def open(self, job: JobId, spec: JobSpec) -> DeciderState[RunState]:
        folder = self.folder(job)
        committed = await self._effects.committed(job)
        run = DeciderState(folder, committed, coordinator.new_run(job, spec), coordinator.decide)
        self.states[job] = run
        await self._effects.open_run(job, spec, folder)
        self._loggers.start(folder, spec)
        return run

    def unended(self) -> dict[JobId, DeciderState[RunState]]:
        return {job: run for job, run in self.states.items() if run.state.phase is not Phase.ENDED}

    def next_unwritten(self) -> DeciderState[RunState] | None:
        """Return a run with decisions that aren't in its journal yet."""
        return next((run for run in self.states.values() if run.has_unwritten), None)

    def forget(self, job: JobId) -> None:
        self.states.pop(job, None)
        self._effects.close_run(job)

    def take_snapshots(self) -> None:
        """Take snapshots that are due, and close the runs that have ended."""
        for job, run in list(self.states.items()):
            run.snapshot_if_due()
            if run.state.phase is Phase.ENDED:
                run.close()
                self.forget(job)

    def log(self, jobs: Iterable[JobId]) -> None:
        """Also write to the logs of these jobs from now on."""
        logged = frozenset(jobs)
        if logged != self._logged:
            self._logged = logged
            serve_runs([self.folder(job) for job in logged])

    def folder(self, job: JobId) -> Path:
        return Path(self._effects.records[job].folder)

    def blobs(self, job: JobId) -> Blobs:
        return blobs_of_run(self.folder(job), self._spec.job_flight(job))

    def answers(self, job: JobId) -> AnswerFiles:
        return AnswerFiles(self.folder(job))
