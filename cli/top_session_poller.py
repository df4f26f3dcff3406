"""Poll the session that runs a job, for what `tlt top` shows beside the journal."""

import asyncio
import threading
from pathlib import Path

from tlt.base.id_types import JobId
from tlt.dashboard.rollout_tail import RunningAnswers
from tlt.dashboard.session_feed import SessionFeed, SessionView
from tlt.errors import NoSession
from tlt.session.session_files import is_up, load_session, session_folder
from tlt.spec.config import SessionSpec
from tlt.store.redis_connection import connect

_POLL_SECONDS = 1.0
_REDIS_SECONDS = 5.0


class SessionWatch(threading.Thread):
    """Poll in a thread, so that a slow Redis does not block the screen."""

    def __init__(self, spec: SessionSpec, job: JobId) -> None:
        super().__init__(daemon=True)
        self._spec = spec
        self._job = job
        self.view: SessionView | None = None
        self.running_answers: RunningAnswers | None = None
        self.followed = False

    def run(self) -> None:
        asyncio.run(self._poll(forever=True))

    def poll_once(self) -> None:
        asyncio.run(self._poll(forever=False))

    async def _poll(self, *, forever: bool) -> None:
        connection = connect(self._spec.redis_url, seconds=_REDIS_SECONDS)
        feed = SessionFeed(self._spec, connection)
        try:
            while True:
                self.view = await feed.view()
                self.running_answers = feed.running_answers(self._job)
                self.followed = feed.serves(self._job)
                if not forever:
                    return
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            await connection.aclose()


def watch_session(folder: Path, session: str) -> SessionWatch | None:
    """Return None if the run does not belong to the session, or the session is down."""
    try:
        spec = load_session(session_folder(session))
    except NoSession:
        return None
    if not is_up(Path(spec.folder)) or folder.parent != Path(spec.runs):
        return None
    return SessionWatch(spec, JobId(folder.name))
