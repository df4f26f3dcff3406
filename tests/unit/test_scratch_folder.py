"""Folders of rewards' owners that were killed are removed; those in use stay."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tlt.isolation.fork_server_client import ScratchFolder

_OWNER = """
import time
from tlt.isolation.fork_server_client import ScratchFolder
print(ScratchFolder().path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def _age(folder: str | Path) -> None:
    os.utime(folder, (0, 0))


def test_removes_the_folder_of_a_killed_owner_only(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner:
        left = Path(owner.stdout.readline().strip())
        (left / "program.py").write_text("x")
        used = ScratchFolder()
        for folder in (left, used.path):
            _age(folder)
        ScratchFolder().remove()
        assert left.exists()
        owner.kill()
    ScratchFolder().remove()
    assert [str(folder) for folder in tmp_path.iterdir()] == [used.path]
    used.remove()
    assert not list(tmp_path.iterdir())


def test_leaves_a_folder_that_was_just_made(tmp_path: Path) -> None:
    young = tmp_path / "tlt-own-code-young"
    young.mkdir()
    ScratchFolder().remove()
    assert young.exists()
    _age(young)
    ScratchFolder().remove()
    assert not young.exists()
