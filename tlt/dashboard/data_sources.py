"""Sources of the dashboard: a session with its jobs, or the folder of one run."""

from pathlib import Path
from typing import Protocol

from tlt.base.id_types import JobId
from tlt.dashboard.run_feed import RunFeed
from tlt.dashboard.run_fold import Run
from tlt.dashboard.session_feed import SessionFeed
from tlt.runs.run_folder_reader import read_spec
from tlt.spec.config import SessionSpec
from tlt.store.redis_connection import Connection, connect

# feeds of runs without listeners that are kept open, beside those of running jobs
_OPEN_FEEDS = 4


class Source(Protocol):
    session: SessionFeed | None

    async def run(self, job: JobId) -> RunFeed | None: ...

    async def close(self) -> None: ...


class FolderSource:
    """A run that has ended or crashed, or runs elsewhere: only its folder is read."""

    def __init__(self, folder: Path) -> None:
        self.session: SessionFeed | None = None
        self.job = JobId(folder.name)
        self._feed = RunFeed(Run(folder, read_spec(folder)))

    async def run(self, job: JobId) -> RunFeed | None:
        return self._feed if job == self.job else None

    async def close(self) -> None:
        await self._feed.stop()


class SessionSource:
    def __init__(self, spec: SessionSpec) -> None:
        self._connection: Connection = connect(spec.redis_url, seconds=5.0)
        self._feed = SessionFeed(spec, self._connection)
        self.session: SessionFeed | None = self._feed
        self._runs: dict[JobId, RunFeed] = {}

    async def run(self, job: JobId) -> RunFeed | None:
        if job not in self._runs:
            record = await self._feed.jobs.get(job)
            if record is None:
                return None
            await self._close_unused()
            if job not in self._runs:  # another request may have opened it meanwhile
                self._runs[job] = RunFeed(
                    Run(Path(record.folder), record.spec),
                    lambda: self._feed.running_answers(job),
                    lambda: self._feed.serves(job),
                )
        return self._runs[job]

    async def _close_unused(self) -> None:
        running = self._feed.running_jobs()
        unused = [
            job
            for job, feed in self._runs.items()
            if not feed.broadcast.listeners and job not in running
        ]
        for job in unused[: max(0, len(unused) - _OPEN_FEEDS + 1)]:
            await self._runs.pop(job).stop()

    async def close(self) -> None:
        await self._feed.stop()
        for feed in self._runs.values():
            await feed.stop()
        await self._connection.aclose()
