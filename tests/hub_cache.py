"""Lay out a cache of the Hugging Face Hub, as its client does, and use it without a network."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

NAME = "org/small"
COMMIT, NEXT = "a1" * 20, "b2" * 20


def use_cache(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Set the variables for processes that start, and what this one has read of them."""
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def add_commit(home: Path, model: Path, commit: str = COMMIT, *refs: str) -> Path:
    """Add the files of a model as a commit of NAME, name it by refs, and return its folder."""
    repository = home / "hub" / "models--org--small"
    blobs, folder = repository / "blobs", repository / "snapshots" / commit
    blobs.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True)
    for file in model.iterdir():
        blob = blobs / f"{commit[:4]}-{file.name}"
        shutil.copyfile(file, blob)
        (folder / file.name).symlink_to(Path("../../blobs") / blob.name)
    for ref in refs:
        move_ref(home, ref, commit)
    return folder


def move_ref(home: Path, ref: str, commit: str) -> None:
    file = home / "hub" / "models--org--small" / "refs" / ref
    file.parent.mkdir(exist_ok=True)
    file.write_text(commit)
