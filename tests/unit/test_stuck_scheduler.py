"""A call of SGLang may take as long as its scheduler works, and ends soon if that hangs."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import pytest
import torch

from tests.waiting import wait_until
from tlt.engine.sglang.client.sglang_client import SglangClient
from tlt.engine.sglang.client.stuck_watch import MOST_EXTENSIONS, StuckWatch, tree_busy_seconds
from tlt.errors import RankError

STUCK_SECONDS = 0.5
COMPUTES, HANGS = "while True: pass", "import time; time.sleep(600)"
# a compiler that a scheduler waits for
COMPILES = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COMPUTES!r}])"
# one that reads weights from a slow disk touches new pages, and computes little
READS = """
import mmap, os, time
memory = os.memfd_create("weights")
os.ftruncate(memory, 1 << 28)
for page in range(0, 1 << 28, 1 << 14):
    mmap.mmap(memory, 1 << 14, offset=page)[0] = 1
    time.sleep(0.005)
"""
Start = Callable[[str], SglangClient]


class Schedulers:
    """Processes in place of SGLang's schedulers."""

    def __init__(self, pid: int) -> None:
        self.schedulers = [pid]
        self.engine = SimpleNamespace(loop=asyncio.new_event_loop(), tokenizer_manager=None)

    def failure(self) -> None:
        """Say that they run."""

    def last_lines(self) -> str:
        return "the last line"


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a scheduler of this code, and a client of it."""
    with ExitStack() as stack:

        def started(code: str) -> SglangClient:
            process = subprocess.Popen([sys.executable, "-c", code], process_group=0)
            stack.callback(process.wait)
            stack.callback(subprocess.run, ["kill", "-KILL", "--", f"-{process.pid}"])
            schedulers = Schedulers(process.pid)
            stack.callback(schedulers.engine.loop.close)
            return SglangClient(schedulers, torch.float32, (), STUCK_SECONDS)  # pyright: ignore[reportArgumentType]

        yield started


@pytest.mark.parametrize("code", [COMPUTES, COMPILES, READS], ids=["computes", "compiles", "reads"])
def test_a_scheduler_that_works_is_waited_for(start: Start, code: str) -> None:
    start(code).run(asyncio.sleep((MOST_EXTENSIONS - 1) * STUCK_SECONDS))


def test_a_scheduler_that_waits_for_another_ones_compiler_is_waited_for(
    start: Start, tmp_path: Path
) -> None:
    compiler = tmp_path / "ptxas"
    compiler.write_text("#!/bin/sh\nwhile :; do :; done\n")
    compiler.chmod(0o755)
    with subprocess.Popen([compiler]) as process:
        try:
            start(HANGS).run(asyncio.sleep((MOST_EXTENSIONS - 1) * STUCK_SECONDS))
        finally:
            process.kill()


def test_a_scheduler_that_hangs_is_found(start: Start) -> None:
    began = monotonic()
    with pytest.raises(RankError, match="SGLang stood still for 0 s: the last line"):
        start(HANGS).run(asyncio.sleep(60))
    assert monotonic() - began < MOST_EXTENSIONS * STUCK_SECONDS


def test_a_scheduler_that_spins_is_found_in_the_end(start: Start) -> None:
    with pytest.raises(RankError, match="computed for 3 s without finishing anything"):
        start(COMPUTES).run(asyncio.sleep(60))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tlt.engine.sglang.client.stuck_watch.monotonic", clock)
    return clock


def test_each_finished_piece_of_work_moves_the_deadline(clock: Clock) -> None:
    watch = StuckWatch(120.0, lambda: 0.0)
    for _ in range(3):
        clock.now += 100
        assert watch.complaint() is None
        watch.note_progress()
    clock.now += 119
    assert watch.complaint() is None
    clock.now += 2
    assert watch.complaint() == "stood still for 120 s"


def test_steps_that_finish_something_do_not_look_at_the_processes(clock: Clock) -> None:
    looks: list[float] = []

    def cpu_seconds() -> float:
        looks.append(clock.now)
        return 0.0

    watch = StuckWatch(120.0, cpu_seconds)
    for step in range(500):
        clock.now += 0.02
        watch.complaint()
        if step % 10 == 0:
            watch.note_progress()
    assert looks == []


def test_the_time_of_what_a_scheduler_has_started_counts(start: Start) -> None:
    (pid,) = start(COMPILES).schedulers
    children = Path(f"/proc/{pid}/task/{pid}/children")
    asyncio.run(wait_until(children.read_text, message="it starts no other"))
    # it only waits from now on
    before = tree_busy_seconds([pid])
    asyncio.run(wait_until(lambda: tree_busy_seconds([pid]) >= before + 0.5))
