"""The process that tells a run's loggers: nothing twice, whoever raises or blocks."""

import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.tensorboard_files import points
from tests.waiting import wait_until
from tlt.config import JobSpec
from tlt.loggers import delivered
from tlt.loggers.logger_thread import Line
from tlt.report import Report
from tlt.store.journal import FILE_NAME


def name_loggers(run: Path, spec: JobSpec, *loggers: str) -> None:
    named = msgspec.structs.replace(spec, loggers=loggers)
    (run / "spec.json").write_bytes(msgspec.json.encode(named))


def start(run: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "tlt.loggers.main", str(run)])


def reports_had(run: Path, logger: str) -> int:
    return delivered.read(run, logger).reports


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_who_comes_after_goes_on_where_it_ended(
    recorded: Path, spec: JobSpec, how: signal.Signals
) -> None:
    name_loggers(recorded, spec, "tensorboard")
    journal = recorded / FILE_NAME
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: len(lines) // 2]))
    first = start(recorded)
    await wait_until(lambda: reports_had(recorded, "tensorboard") >= 3, 30)
    first.send_signal(how)
    second = start(recorded)
    journal.write_bytes(b"".join(lines))
    assert second.wait(30) == 0
    assert first.wait(30) == (0 if how is signal.SIGTERM else -how)
    written = points(recorded)
    assert set(written.values()) == {1}
    steps = {step for tag, step in written if tag == "train/reward"}
    evals = {step for tag, step in written if tag == "eval/reward"}
    if how is signal.SIGTERM:
        assert (steps, evals) == (set(range(8)), {0, 4, 8})
    else:  # in the middle of a write
        assert len(steps) + len(evals) >= 10


class Misbehaved:
    """A package on a bad day."""

    def __init__(self, waits: threading.Event | None = None) -> None:
        self._waits = waits

    def write(self, report: Report) -> None:
        if self._waits is None:
            raise ConnectionError("no route to the wall of screens")
        self._waits.wait()

    def close(self) -> None:
        raise AssertionError("it was left alone")


class Kept:
    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.closed = False

    def write(self, report: Report) -> None:
        self.numbers.append(report.number)

    def close(self) -> None:
        self.closed = True


async def test_one_that_raises_or_blocks_is_named_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / delivered.FOLDER).mkdir()
    with capture_logs() as logs:
        good = await _tell_three(tmp_path, logs)
    assert good.numbers == [0, 1, 2]
    assert good.closed
    assert [entry["logger"] for entry in logs] == ["wandb", "trackio"]
    assert "no route" in str(delivered.read(tmp_path, "wandb").error)
    assert "did not answer" in str(delivered.read(tmp_path, "trackio").error)
    assert delivered.read(tmp_path, "tensorboard").error is None


async def _tell_three(folder: Path, logs: Sequence[Mapping[str, Any]]) -> Kept:
    forever, good = threading.Event(), Kept()
    made = {"wandb": Misbehaved(), "trackio": Misbehaved(forever), "tensorboard": good}
    lines = [Line(name, folder, lambda name, _: made[name]) for name in made]
    for line in lines:
        line.start()
    for number in range(3):
        for line in lines:
            line.tell(Report(number=number, began=0.0, step=number, at=0.0, figures={}, spans=()))
    await wait_until(lambda: "no route" in str(logs))

    def is_named() -> bool:
        for line in lines:
            line.give_up_if_stuck(0.01)
        return "did not answer" in str(logs)

    await wait_until(is_named)
    for line in lines:
        line.finish()
    await wait_until(lambda: not lines[0].is_alive() and not lines[2].is_alive())
    forever.set()
    return good
