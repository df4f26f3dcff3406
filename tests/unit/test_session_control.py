"""`tlt down` signals the session's supervisor, and no other process."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from tlt.actors.supervisor.ray_head import RayHead
from tlt.actors.supervisor.session_supervisor import Stop
from tlt.errors import NoSession, TltError
from tlt.session.control import stop_session
from tlt.session.session_files import LOCK_FILE, session_folder

_SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_a_process_that_has_the_supervisors_old_number_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLT_HOME", str(tmp_path))
    folder = session_folder("one")
    folder.mkdir(parents=True)
    with subprocess.Popen(_SLEEP) as other, open(folder / LOCK_FILE, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(b"%d" % other.pid)
        lock.flush()
        with pytest.raises(NoSession):
            stop_session("one")
        assert other.poll() is None
        other.kill()


def test_a_driver_that_has_just_begun_is_ended(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    head = RayHead(tmp_path, tmp_path / "short")
    # without the session's mark, as for some milliseconds after a fork
    head._driver = driver = subprocess.Popen(_SLEEP)
    head.end()
    assert driver.returncode is not None


def test_a_start_ends_at_the_next_step_after_a_signal() -> None:
    stop = Stop()
    stop.check()
    assert not stop.wait(0.0)
    stop(15, None)
    assert stop.wait(0.0)
    with pytest.raises(TltError, match="it was ended while it started"):
        stop.check()
