"""The logger process sends no report twice, and abandons loggers that raise or block."""

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
from tlt.loggers import delivery_state
from tlt.loggers.logger_thread import LoggerThread
from tlt.report import LoggerReport
from tlt.spec.config import JobSpec
from tlt.store.journal import FILE_NAME


def name_loggers(run: Path, spec: JobSpec, *loggers: str) -> None:
    named = msgspec.structs.replace(spec, loggers=loggers)
    (run / "spec.json").write_bytes(msgspec.json.encode(named))


def start(run: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "tlt.loggers.main", str(run)])


def reports_sent(run: Path, logger: str) -> int:
    return delivery_state.read(run, logger).reports


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_successor_continues_where_the_process_ended(
    recorded: Path, spec: JobSpec, how: signal.Signals
) -> None:
    name_loggers(recorded, spec, "tensorboard")
    journal = recorded / FILE_NAME
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: len(lines) // 2]))
    first = start(recorded)
    await wait_until(lambda: reports_sent(recorded, "tensorboard") >= 3, 30)
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
    else:  # killed in the middle of a write
        assert len(steps) + len(evals) >= 10


class BrokenLogger:
    """Raise, or block until an event is set."""

    def __init__(self, waits: threading.Event | None = None) -> None:
        self._waits = waits

    def write(self, report: LoggerReport) -> None:
        if self._waits is None:
            raise ConnectionError("no route to the server")
        self._waits.wait()

    def close(self) -> None:
        raise AssertionError("an abandoned logger was closed")


class StoringLogger:
    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.closed = False

    def write(self, report: LoggerReport) -> None:
        self.numbers.append(report.number)

    def close(self) -> None:
        self.closed = True


async def test_abandons_loggers_that_raise_or_block(tmp_path: Path) -> None:
    (tmp_path / delivery_state.FOLDER).mkdir()
    with capture_logs() as logs:
        good = await _send_three_reports(tmp_path, logs)
    assert good.numbers == [0, 1, 2]
    assert good.closed
    assert [entry["logger"] for entry in logs] == ["wandb", "trackio"]
    assert "no route" in str(delivery_state.read(tmp_path, "wandb").error)
    assert "did not answer" in str(delivery_state.read(tmp_path, "trackio").error)
    assert delivery_state.read(tmp_path, "tensorboard").error is None


async def _send_three_reports(folder: Path, logs: Sequence[Mapping[str, Any]]) -> StoringLogger:
    forever, good = threading.Event(), StoringLogger()
    made = {"wandb": BrokenLogger(), "trackio": BrokenLogger(forever), "tensorboard": good}
    threads = [LoggerThread(name, folder, lambda name, _: made[name]) for name in made]
    for thread in threads:
        thread.start()
    for number in range(3):
        for thread in threads:
            thread.send(
                LoggerReport(number=number, began=0.0, step=number, at=0.0, figures={}, spans=())
            )
    await wait_until(lambda: "no route" in str(logs))

    def is_named() -> bool:
        for thread in threads:
            thread.abandon_if_stuck(0.01)
        return "did not answer" in str(logs)

    await wait_until(is_named)
    for thread in threads:
        thread.finish()
    await wait_until(lambda: not threads[0].is_alive() and not threads[2].is_alive())
    forever.set()
    return good
