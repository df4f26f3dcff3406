"""No name from outside leads out of its folder, and no folder of another user is used."""

import ast
import os
import re
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.samples import JOB, answer, prompt
from tlt.base.id_types import Attempt, Digest, Epoch, PolicyVersion, Step
from tlt.errors import ConfigError, StoreError, TltError
from tlt.protocol.commands import PromptIssued
from tlt.protocol.events import AnyEvent, CheckpointCommitted
from tlt.protocol.refs import SCHEMA_VERSION, AnswerRef, BlobRef, Checkpoint
from tlt.session import leftovers, session_files
from tlt.session.control import new_session
from tlt.session.leftovers import claim
from tlt.session.session_files import SESSION_FILE, session_folder, write_session
from tlt.spec.config import SessionSpec
from tlt.store.journal import FILE_NAME, read
from tlt.store.message_codec import Codec

_events = Codec[AnyEvent](AnyEvent)
_NAMES = ("..", ".", "", "../../etc/passwd", "/etc/passwd", "a/b", "a\0b", "é" * 300)
_IMPORTS = re.compile(r"pickle|cloudpickle|dill|marshal|shelve|joblib")
# what a function's author pickles, and what SGLang's own processes say to each other
_PICKLES = {
    "tlt/api/reward_functions.py",
    "tlt/rewards/kinds/reward_functions.py",
}


def checkpoint(digest: str = "00", shard: str = "__0_0.distcp") -> AnyEvent:
    weights = BlobRef(digest=Digest(digest), bytes=1)
    saved = Checkpoint(
        version=PolicyVersion(1),
        weights=weights,
        optimiser=None,
        optimiser_shards={shard: weights},
    )
    return CheckpointCommitted(
        job=JOB, epoch=Epoch(1), step=Step(1), attempt=Attempt(0), checkpoint=saved
    )


def finished(file: str) -> AnyEvent:
    ref = AnswerRef(file=file, offset=0, bytes=1, digest=Digest("00"))
    return msgspec.structs.replace(answer(0), answer=ref)


def test_names_of_a_message_are_the_names_of_files() -> None:
    # recordings leave the file of an answer out
    for event in (checkpoint(), checkpoint(shard=".metadata"), finished("3.0"), finished("")):
        assert _events.decode(_events.encode(event)) == event
    for name in _NAMES:
        crafted = [checkpoint(digest=name), checkpoint(shard=name)]
        crafted += [finished(name)] if name else []
        for event in crafted:
            with pytest.raises(StoreError, match="cannot be read"):
                _events.decode(_events.encode(event))


@pytest.mark.parametrize("job", [*_NAMES[:-1], "*", "job-[1]", "a b"])
def test_a_jobs_name_is_neither_a_path_nor_a_pattern_of_keys(job: Any) -> None:
    codec = Codec[PromptIssued](PromptIssued)
    with pytest.raises(StoreError, match="cannot be read"):
        codec.decode(codec.encode(msgspec.structs.replace(prompt(0), job=job)))


def test_a_journal_of_another_run_names_no_other_files(tmp_path: Path) -> None:
    event = msgspec.to_builtins(finished("../../etc/passwd"))
    line = {"seq": 0, "schema": SCHEMA_VERSION, "at": 1.0, "event": event, "commands": "00"}
    (tmp_path / FILE_NAME).write_bytes(msgspec.json.encode(line) + b"\n")
    with pytest.raises(TltError, match="entry 0 cannot be read"):
        list(read(tmp_path / FILE_NAME))


@pytest.mark.parametrize("name", ["..", "../other", "/etc", "", ".hidden", "a*"])
def test_a_sessions_name_is_no_path(name: str) -> None:
    with pytest.raises(ConfigError, match="--session"):
        session_folder(name)


def test_what_holds_a_password_is_readable_for_its_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLT_HOME", str(tmp_path))
    folder = session_folder("one")
    folder.mkdir(parents=True, mode=0o755)
    spec = SessionSpec(
        name="one", folder=str(folder), runs="/runs", flight="/f", redis_url="redis://:secret@h"
    )
    write_session(spec)
    assert "secret" in (folder / SESSION_FILE).read_text()
    assert stat.S_IMODE((folder / SESSION_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setattr(session_files.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(ConfigError, match="it must be a folder of your own"):
        write_session(spec)


def test_refuses_a_url_without_showing_its_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write redis://") as refused:
        new_session(
            "one",
            workers=1,
            ranks=1,
            redis_url="redis:/:secret@host",
            runs=tmp_path,
            device="cpu",
            lease_seconds=4.0,
        )
    assert "secret" not in str(refused.value)


def test_uses_no_folder_that_another_user_made_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TltError, match="it must be a folder of your own"):
        claim(tmp_path / "link", tmp_path)
    (tmp_path / "place").mkdir(mode=0o755)
    claim(tmp_path / "place", tmp_path).close()
    assert stat.S_IMODE((tmp_path / "place").stat().st_mode) == 0o700
    monkeypatch.setattr(leftovers.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(TltError, match="it must be a folder of your own"):
        claim(tmp_path / "place", tmp_path)


def test_nothing_on_a_wire_is_pickled() -> None:
    found = {
        str(file)
        for folder in ("tlt", "cli")
        for file in Path(folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or "", *(each.name for each in node.names)]
        if _IMPORTS.fullmatch(name)
    }
    assert found == _PICKLES
