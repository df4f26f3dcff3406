"""Folders of dead sessions are removed, those of sessions that are up and of others are not."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tlt.base.end_session_processes import mark, processes_of
from tlt.session import leftovers
from tlt.session.leftovers import OWNER_FILE, claim, remove_dead_session, remove_leftovers
from tlt.session.session_files import short_folder

DEAD, UP, OWN = "dead", "up", "own"


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use folders instead of /tmp and /dev/shm."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(leftovers, "shared_memory", lambda: tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path


def place(session: Path) -> Path:
    return short_folder(session)


def test_removes_what_dead_sessions_left_and_nothing_else(tmp_path: Path) -> None:
    kept: list[Path] = []
    for name in (DEAD, OWN):
        claim(place(tmp_path / name), tmp_path / name).close()
    blobs = tmp_path / "shm" / f"{place(tmp_path / DEAD).name}-blobs"
    claim(blobs, tmp_path / DEAD).close()
    (blobs / "weights").write_bytes(b"w")
    held = claim(place(tmp_path / UP), tmp_path / UP)
    of_an_older_release = tmp_path / f"tlt-{os.getuid()}-0123456789"
    of_another_user = tmp_path / f"tlt-{os.getuid() + 1}-0123456789"
    link = tmp_path / f"tlt-{os.getuid()}-abcdef0123"
    link.symlink_to(of_another_user)
    kept += [place(tmp_path / OWN), place(tmp_path / UP), of_an_older_release, of_another_user]
    of_an_older_release.mkdir()
    claim(of_another_user, tmp_path / DEAD).close()
    process = subprocess.Popen(["sleep", "60"], env=os.environ | mark(tmp_path / DEAD))

    removed = remove_leftovers(except_of=tmp_path / OWN)

    assert sorted(removed) == sorted([place(tmp_path / DEAD), blobs])
    assert [path for path in removed if path.exists()] == []
    assert [path for path in [*kept, link] if not path.exists()] == []
    assert process.wait() < 0
    held.close()


def test_a_claim_is_refused_while_another_process_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "_CLAIM_SECONDS", 0.0)
    held = claim(tmp_path / "place", tmp_path / "one")
    with pytest.raises(leftovers.TltError, match="another process uses it"):
        claim(tmp_path / "place", tmp_path / "two")
    held.close()
    again = claim(tmp_path / "place", tmp_path / "two")
    assert (tmp_path / "place" / OWNER_FILE).read_text() == str(tmp_path / "two")
    again.close()


def test_a_dead_session_is_removed_on_request(tmp_path: Path) -> None:
    session = tmp_path / "session"
    session.mkdir()
    short = place(session)
    assert not remove_dead_session(session, short)
    claim(short, session).close()
    process = subprocess.Popen(["sleep", "60"], env=os.environ | mark(session))
    assert remove_dead_session(session, short)
    assert not short.exists()
    assert processes_of(session) == {}
    process.wait()
