"""What there is to show: a session with its jobs, or one run's folder."""

from pathlib import Path
from typing import Protocol

from tlt.config import JobSpec, SessionSpec
from tlt.dashboard.run_feed import RunFeed
from tlt.dashboard.run_fold import Run, read_spec
from tlt.dashboard.session_feed import SessionFeed
from tlt.ids import JobId
from tlt.store.redis_connection import Connection, connect

# runs that are kept open, so that coming back to one is quick
_OPEN = 4


class Source(Protocol):
    session: SessionFeed | None

    async def run(self, job: JobId) -> RunFeed | None: ...

    async def close(self) -> None: ...


def _nobody_knows() -> None:
    """Who has what in hand, without a session to ask."""


class FolderSource:
    """A run that has ended or crashed, or is at work elsewhere: nothing but its folder is read."""

    def __init__(self, folder: Path) -> None:
        self.session: SessionFeed | None = None
        self.job = JobId(folder.name)
        self._feed = RunFeed(Run(folder, read_spec(folder)), _nobody_knows, followed=lambda: False)

    async def run(self, job: JobId) -> RunFeed | None:
        return self._feed if job == self.job else None

    async def close(self) -> None:
        await self._feed.stop()


class SessionSource:
    def __init__(self, spec: SessionSpec) -> None:
        self._connection: Connection = connect(spec.redis_url, seconds=5.0)
        self.session: SessionFeed | None = SessionFeed(spec, self._connection)
        self._feed = self.session
        self._runs: dict[JobId, RunFeed] = {}

    async def run(self, job: JobId) -> RunFeed | None:
        if job not in self._runs:
            record = await self._feed.jobs.get(job)
            if record is None:
                return None
            await self._make_room()
            if job not in self._runs:  # nobody else has asked meanwhile
                self._runs[job] = self._open(job, Path(record.folder), record.spec)
        return self._runs[job]

    def _open(self, job: JobId, folder: Path, spec: JobSpec) -> RunFeed:
        feed = self._feed
        return RunFeed(
            Run(folder, spec), lambda: feed.holding(job), followed=lambda: feed.follows(job)
        )

    async def _make_room(self) -> None:
        unused = [job for job, feed in self._runs.items() if not feed.channel.listeners]
        for job in unused[: max(0, len(self._runs) - _OPEN + 1)]:
            await self._runs.pop(job).stop()

    async def close(self) -> None:
        await self._feed.stop()
        for feed in self._runs.values():
            await feed.stop()
        await self._connection.aclose()
