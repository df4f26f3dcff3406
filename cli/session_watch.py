"""What `tlt top` hears of the session that is at a job, beside what the journal says."""

import asyncio
import threading
from pathlib import Path

from tlt.config import SessionSpec
from tlt.dashboard.rollout_tail import RunningAnswers
from tlt.dashboard.session_feed import SessionFeed, SessionView
from tlt.errors import NoSession
from tlt.ids import JobId
from tlt.session_files import is_up, load_session, session_folder
from tlt.store.redis_connection import connect

_LOOK_SECONDS = 1.0
_REDIS_SECONDS = 5.0


class SessionWatch(threading.Thread):
    """In a thread of its own: a Redis that is slow keeps no screen waiting."""

    def __init__(self, spec: SessionSpec, job: JobId) -> None:
        super().__init__(daemon=True)
        self._spec = spec
        self._job = job
        self.view: SessionView | None = None
        self.holding: RunningAnswers | None = None
        self.followed = False

    def run(self) -> None:
        asyncio.run(self._look(forever=True))

    def look_once(self) -> None:
        asyncio.run(self._look(forever=False))

    async def _look(self, *, forever: bool) -> None:
        connection = connect(self._spec.redis_url, seconds=_REDIS_SECONDS)
        feed = SessionFeed(self._spec, connection)
        try:
            while True:
                self.view = await feed.view()
                self.holding = feed.running_answers(self._job)
                self.followed = feed.attends(self._job)
                if not forever:
                    return
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            await connection.aclose()


def session_of(folder: Path, session: str) -> SessionWatch | None:
    """None where the run is none of this session's, or the session is down."""
    try:
        spec = load_session(session_folder(session))
    except NoSession:
        return None
    if not is_up(Path(spec.folder)) or folder.parent != Path(spec.runs):
        return None
    return SessionWatch(spec, JobId(folder.name))
