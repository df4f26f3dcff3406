"""The recorded run, in a folder as a session leaves it."""

import sys
from pathlib import Path

import pytest

from tlt.runs.run_folder_reader import read_spec
from tlt.spec.config import JobSpec
from tlt.store.journal import FILE_NAME, JournalEntry, read

_DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(_DOCS))
    recording = __import__("recording")
    return recording.unpack(tmp_path / "tiny-reasoner-1")


@pytest.fixture
def spec(recorded: Path) -> JobSpec:
    return read_spec(recorded)


@pytest.fixture
def entries(recorded: Path) -> list[JournalEntry]:
    return list(read(recorded / FILE_NAME))


@pytest.fixture(autouse=True)
def _unload_recording() -> object:
    yield
    sys.modules.pop("recording", None)
