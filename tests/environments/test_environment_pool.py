"""Environments run in processes of their own: what goes wrong in one harms no other answer."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.waiting import wait_until
from tlt.environments.environment_messages import Judge, Reset, Step
from tlt.environments.environment_pool import (
    EnvironmentEnded,
    EnvironmentFailed,
    EnvironmentPool,
    EnvironmentProcess,
)
from tlt.errors import ConfigError
from tlt.spec.environment import EnvironmentSpec

CODE = """
import asyncio, os, socket, subprocess
from pathlib import Path


class Counter:
    def reset(self, row, seed):
        self.row, self.seed, self.steps = row, seed, 0
        if row.get("opens"):
            return [{"role": "user", "content": f"seed {seed}"}], [{"type": "function"}]

    async def step(self, message):
        self.steps += 1
        match message["content"]:
            case "raise": raise KeyError("x")
            case "exit": os._exit(3)
            case "hang": await asyncio.sleep(600)
            case "wait": await asyncio.sleep(0.3)
            case "pid": return [{"role": "user", "content": str(os.getpid())}], False
            case "no role": return [{"content": "x"}], False
            case "huge": return [{"role": "user", "content": "x", "n": 1 << 70}], False
            case "half": return [{"role": "user", "content": chr(0xD83D)}], False
            case "write": Path("left").write_text("x")
            case "go": os.chdir(self.row["to"])
            case "files":
                seen = f"{sorted(os.listdir())} {os.environ['TMPDIR'] == os.getcwd()}"
                return [{"role": "user", "content": seen}], False
            case "no text": return [{"role": "user", "content": None}], False
            case "network": socket.create_connection(("127.0.0.1", 1))
            case "elsewhere": Path(self.row["file"]).write_text("x")
            case "memory": return len(bytearray(4_000_000_000))
            case "start": subprocess.Popen(["sleep", "611.25"], start_new_session=True)
            case "running":
                search = ["pgrep", "-cf", "sleep 611[.]25"]
                seen = subprocess.run(search, capture_output=True, text=True)
                return [{"role": "user", "content": seen.stdout.strip()}], False
        return [{"role": "tool", "content": str(self.steps)}], self.steps == 3

    async def reward(self, trajectory):
        if trajectory["stop"] == "nan": return float("nan")
        if trajectory["stop"] == "none": return None
        return len(trajectory["messages"]) + self.steps


def broken():
    raise RuntimeError("no world")
"""
Start = Callable[..., EnvironmentPool]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    file = tmp_path / "counter.py"
    file.write_text(CODE)
    pools: list[EnvironmentPool] = []

    def begin(
        name: str = "Counter", seconds: float = 10.0, writable: tuple[str, ...] = ()
    ) -> EnvironmentPool:
        spec = EnvironmentSpec(factory=f"{file}:{name}", timeout_seconds=seconds, writable=writable)
        pools.append(EnvironmentPool(spec, tmp_path / "environment.log"))
        return pools[-1]

    yield begin
    for pool in pools:
        pool.stop()


def said(content: str = "") -> Step:
    return Step(message={"role": "assistant", "content": content})


RESET = Reset(row={}, seed=7)


async def test_holds_a_conversation(start: Start) -> None:
    process = await start().take()
    opened = await process.call(Reset(row={"opens": True, "huge": 1 << 70}, seed=7))
    assert opened.messages == [{"role": "user", "content": "seed 7"}]
    assert opened.tools == [{"type": "function"}]
    observed = [await process.call(said()) for _ in range(3)]
    assert [o.messages for o in observed] == [[{"role": "tool", "content": c}] for c in "123"]
    assert [o.done for o in observed] == [False, False, True]
    messages = [{"role": "user", "content": "x"}]
    judged = await process.call(Judge(messages=messages, stop="stop", counts=True))
    assert judged.reward == 4.0


async def test_a_process_serves_one_answer_after_the_other(start: Start) -> None:
    pool = start()
    first = await pool.take()
    assert (await first.call(RESET)).messages is None
    await first.call(said())
    await first.call(Judge(messages=[], stop="none", counts=True))
    pool.put_back(first)
    second = await pool.take()
    assert second is first
    await second.call(RESET)
    assert (await second.call(said())).messages == [{"role": "tool", "content": "1"}]
    # it isn't over, so nobody else may have it
    pool.put_back(second)
    assert await pool.take() is not second


async def test_environments_wait_at_the_same_time(start: Start) -> None:
    pool = start()
    processes = [await pool.take() for _ in range(8)]
    await asyncio.gather(*(process.call(RESET) for process in processes))
    began = asyncio.get_running_loop().time()
    await asyncio.gather(*(process.call(said("wait")) for process in processes))
    assert asyncio.get_running_loop().time() - began < 8 * 0.3


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("raise", "KeyError: 'x'"),
        ("no role", "step gave a message without a role"),
        ("no text", "step gave a message whose content is no text"),
        # what the worker couldn't pass on
        ("huge", "OverflowError"),
        ("half", "UnicodeEncodeError"),
        ("network", "OSError|Refused"),
        ("elsewhere", "environment.writable names folders"),
        ("memory", "MemoryError"),
        ("hang", "no answer within 1 s"),
    ],
)
async def test_says_why_an_environment_failed(
    start: Start, content: str, complaint: str, tmp_path: Path
) -> None:
    pool = start(seconds=1.0)
    process = await pool.take()
    await process.call(Reset(row={"file": str(tmp_path / "x")}, seed=0))
    with pytest.raises(EnvironmentFailed, match=complaint):
        await process.call(said(content))
    assert not process.is_reusable


async def test_a_reward_that_is_no_number_is_an_error(start: Start) -> None:
    process = await start().take()
    await process.call(RESET)
    with pytest.raises(EnvironmentFailed, match="the reward is nan"):
        await process.call(Judge(messages=[], stop="nan", counts=True))
    # where another reward counts, nobody asks
    assert (await process.call(Judge(messages=[], stop="nan", counts=False))).reward is None


async def test_a_process_that_ends_is_told_from_one_that_fails(start: Start) -> None:
    pool = start()
    process = await pool.take()
    await process.call(RESET)
    with pytest.raises(EnvironmentEnded):
        await process.call(said("exit"))
    pool.put_back(process)
    with pytest.raises(EnvironmentEnded):
        await process.call(said())
    assert await (await pool.take()).call(RESET)


async def test_what_an_environment_started_ends_with_the_answer(start: Start) -> None:
    pool = start()
    process = await pool.take()
    await process.call(RESET)
    await process.call(said("start"))
    (running,) = (await process.call(said("running"))).messages or []
    assert running["content"] == "1"
    await process.call(Judge(messages=[], stop="stop", counts=True))
    await process.call(RESET)
    (running,) = (await process.call(said("running"))).messages or []
    assert running["content"] == "0"


async def test_answers_write_into_folders_of_their_own(start: Start) -> None:
    pool = start()
    one, other = await pool.take(), await pool.take()
    for process in (one, other):
        await process.call(RESET)
    await one.call(said("write"))

    async def files(process: EnvironmentProcess) -> str:
        (message,) = (await process.call(said("files"))).messages or []
        return str(message["content"])

    assert await files(one) == "['left'] True"
    assert await files(other) == "[] True"
    await one.call(Judge(messages=[], stop="stop", counts=True))
    # the next answer finds nothing of this one
    await one.call(RESET)
    assert await files(one) == "[] True"


async def test_empties_no_folder_that_an_environment_has_gone_to(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    process = await start(writable=(str(tmp_path),)).take()
    await process.call(Reset(row={"to": str(tmp_path / "kept")}, seed=0))
    await process.call(said("go"))
    await process.call(Judge(messages=[], stop="stop", counts=True))
    await process.call(RESET)
    assert (tmp_path / "kept" / "file").exists()
    (message,) = (await process.call(said("files"))).messages or []
    assert message["content"] == "[] True"


async def test_a_process_that_was_killed_meanwhile_is_given_to_nobody(start: Start) -> None:
    pool = start()
    process = await pool.take()
    await process.call(RESET)
    await process.call(Judge(messages=[], stop="stop", counts=True))
    pool.put_back(process)
    assert process._child is not None  # pyright: ignore[reportPrivateUsage]
    handle = process._child.handle  # pyright: ignore[reportPrivateUsage]
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    await wait_until(lambda: process.has_ended)
    assert await (await pool.take()).call(RESET)


async def test_the_server_of_environments_may_be_killed(start: Start) -> None:
    pool = start()
    await pool.start()
    server = pool.server._process  # pyright: ignore[reportPrivateUsage]
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    await wait_until(lambda: server.poll() is not None)
    assert await (await pool.take()).call(RESET)


async def test_refuses_what_cannot_be_loaded(start: Start) -> None:
    with pytest.raises(ConfigError, match="has no function 'Missing'"):
        await start("Missing").start()
    process = await start("broken").take()
    with pytest.raises(EnvironmentFailed, match="RuntimeError: no world"):
        await process.call(RESET)
