"""Loggers write with the real packages, and are refused if these are not installed."""

import json
import sqlite3
from pathlib import Path

import pytest

from cli.config import load_job
from tests.loggers.test_reports import reported
from tlt.errors import ConfigError
from tlt.loggers import installed_check
from tlt.loggers.backends import LoggedRun, open_logger
from tlt.spec.config import JobSpec
from tlt.store.journal import JournalEntry

_ROOT = Path(__file__).resolve().parent.parent.parent
_SPEC = _ROOT / "configs" / "tiny-reasoner.yaml"


def test_refuses_a_logger_whose_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(installed_check.PACKAGES, "wandb", ("no_such_package.module", "wandb"))
    assert load_job(_SPEC, ["loggers=[tensorboard]"]).loggers == ("tensorboard",)
    with pytest.raises(ConfigError, match="wandb is not installed: pip install wandb"):
        load_job(_SPEC, ["loggers=[tensorboard, wandb]"])


def test_wandb_stores_the_steps_offline(
    recorded: Path, spec: JobSpec, entries: list[JournalEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    _write_twice("wandb", recorded, spec, entries)
    files = list((recorded / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2  # one for each time that the run was opened
    assert all(b"train/reward" in file.read_bytes() for file in files)


def test_trackio_stores_every_step_once(
    recorded: Path,
    spec: JobSpec,
    entries: list[JournalEntry],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    _write_twice("trackio", recorded, spec, entries)
    with sqlite3.connect(tmp_path / "trackio" / "tlt.db") as database:
        rows = database.execute("select step, metrics from metrics").fetchall()
    steps = [step for step, metrics in rows if "train/reward" in json.loads(metrics)]
    assert sorted(steps) == list(range(8))


def _write_twice(name: str, run: Path, spec: JobSpec, entries: list[JournalEntry]) -> None:
    """Write the first half of the reports with one logger, the rest with its successor."""
    reports = reported(spec, entries)
    half = len(reports) // 2
    for part in (reports[:half], reports[half:]):
        logged = LoggedRun(run.name, run, spec, "cafe")
        logger = open_logger(name, logged)
        for report in part:
            logger.write(report)
        logger.close()
