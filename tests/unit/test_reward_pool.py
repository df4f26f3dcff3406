"""Every answer gets a result in time, even if the user's code fails, hangs or takes too much."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import is_inhabited
from tests.waiting import wait_until
from tlt.errors import ConfigError
from tlt.rewards.process.reward_pool import RewardPool
from tlt.rewards.reward_messages import ScoreResult
from tlt.spec.reward import RewardSpec

FALLBACK = -0.5
CODE = """
import asyncio, os, signal, socket, subprocess, sys, time
from pathlib import Path

print("imported")

def reward(*, completion, answer, row):
    match completion:
        case "raise": raise KeyError("x")
        case "nan": return float("nan")
        case "inf": return float("inf")
        case "none": return None
        case "word": return "many"
        case "exit": os._exit(3)
        case "count and exit":
            with open(row["file"], "a") as file: file.write("x")
            os._exit(3)
        case "sys.exit": sys.exit(3)
        case "abort": os.abort()
        case "hang":
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            Path(row["pid"]).write_text(os.readlink("/proc/self/ns/pid"))
            time.sleep(600)
        case "print": print("printed")
        case "gate":
            Path(row["pid"]).touch()
            while not Path(row["open"]).exists(): time.sleep(0.005)
            return 99
        case "memory": return len(bytearray(4_000_000_000))
        case "elsewhere": Path(row["file"]).write_text("x")
        case "here": Path("mine").write_text("x")
        case "network": socket.create_connection(("127.0.0.1", row["port"]))
        case "fork":
            while True:
                try: os.fork()
                except OSError: time.sleep(0.01)
        case "child": return subprocess.run(["false"]).returncode
        case "copy":
            if os.fork() == 0: return 77
        case "cycle":
            error = ValueError("x")
            error.__cause__ = error
            raise error
        case "leave": subprocess.Popen(["sleep", "600"], start_new_session=True)
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
    return answer + row.get("x", 0)

async def slow(completion, answer, row):
    await asyncio.sleep(0.5)
    return 1

def many(completions, answers, rows, lengths):
    if "raise" in completions: raise KeyError("x")
    if "few" in completions: return [1]
    return [len(completions) + length for length in lengths]
"""

Start = Callable[..., RewardPool]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Return a function that makes a pool of one of the functions above."""
    (tmp_path / "own.py").write_text(CODE)
    (tmp_path / "shared").mkdir()
    pools: list[RewardPool] = []

    def make(function: str = "reward", **changes: Any) -> RewardPool:
        settings: dict[str, Any] = {
            "on_error": FALLBACK,
            "timeout_seconds": 30.0,
            "writable": (str(tmp_path / "shared"),),
        }
        spec = RewardSpec(
            kind="function",
            function=function if ":" in function else f"{tmp_path}/own.py:{function}",
            **(settings | changes),
        )
        pools.append(RewardPool(spec, tmp_path / "logs" / "reward.log", 2))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.stop()
    await asyncio.sleep(0)  # the loop closes the links


async def test_scores_answers_one_after_the_other(start: Start, tmp_path: Path) -> None:
    pool = start(workers=1)
    for number in range(5):
        assert await pool.score("", number, {"x": 0.25}) == ScoreResult(reward=number + 0.25)
    assert await pool.score("print", 1, {}) == ScoreResult(reward=1.0)
    await pool.stop()
    log = (tmp_path / "logs" / "reward.log").read_text()
    assert log.splitlines() in (["imported"], ["imported", "printed"])


@pytest.mark.parametrize(
    ("completion", "error"),
    [
        ("raise", "KeyError: 'x'"),
        ("nan", "the reward is nan"),
        ("inf", "the reward is inf"),
        ("word", "ValueError: could not convert string to float: 'many'"),
        ("exit", "the reward's process ended"),
        ("sys.exit", "the reward's process ended"),
        ("abort", "the reward's process ended"),
        ("memory", "MemoryError:"),
    ],
)
async def test_failure_gets_the_fallback_and_the_next_answer_is_scored(
    completion: str, error: str, start: Start
) -> None:
    pool = start()
    result = await pool.score(completion, 1, {})
    assert result.reward == FALLBACK
    assert result.error is not None
    assert result.error.startswith(error)
    assert await pool.score("", 2, {}) == ScoreResult(reward=2.0)


async def test_an_error_is_no_score_unless_the_spec_says_so(start: Start) -> None:
    pool = start(on_error=None)
    assert await pool.score("raise", 1, {}) == ScoreResult(error="KeyError: 'x'")
    assert await pool.score("none", 1, {}) == ScoreResult()


async def test_may_write_to_its_own_folder_and_to_those_of_the_spec(
    start: Start, tmp_path: Path
) -> None:
    pool, outside, shared = start(), tmp_path / "outside", tmp_path / "shared" / "file"
    denied = await pool.score("elsewhere", 1, {"file": str(outside)})
    assert denied.reward == FALLBACK
    assert denied.error is not None
    assert "Permission denied" in denied.error
    assert "reward.writable" in denied.error
    assert not outside.exists()
    assert (await pool.score("elsewhere", 1, {"file": str(shared)})).error is None
    assert shared.read_text() == "x"
    assert (await pool.score("here", 1, {})).error is None


async def test_uses_the_network_only_where_the_spec_says_so(start: Start) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        row = {"port": server.sockets[0].getsockname()[1]}
        denied = await start().score("network", 1, row)
        assert denied.error is not None
        assert "Network is unreachable" in denied.error
        assert "reward.network" in denied.error
        assert (await start(network=True).score("network", 1, row)).error is None


async def test_what_forks_without_end_is_ended_and_others_are_scored(start: Start) -> None:
    pool = start(timeout_seconds=1.0)
    forking = asyncio.create_task(pool.score("fork", 1, {}))
    others = [await pool.score("child", 1, {}) for _ in range(3)]
    assert [result.reward for result in others] == [1.0] * 3
    assert (await forking).error == "no answer within 1 s"
    assert await pool.score("", 2, {}) == ScoreResult(reward=2.0)


async def test_a_copy_of_the_process_answers_nobody(start: Start) -> None:
    """Its result would be taken for that of a later request."""
    pool = start(workers=1)
    results = [await pool.score("copy" if n % 2 else "", n, {}) for n in range(8)]
    assert [result.reward for result in results] == list(range(8))


async def test_what_an_answer_leaves_running_ends_with_it(start: Start) -> None:
    pool = start(workers=1)
    results = [await pool.score("leave", n, {}) for n in range(400)]
    assert {result.error for result in results} == {None}


@pytest.mark.parametrize(
    ("completion", "error"), [("\ud800", "surrogates"), ("cycle", "ValueError")]
)
async def test_odd_answers_and_errors_end_nothing(
    completion: str, error: str, start: Start
) -> None:
    pool = start(workers=1)
    result = await pool.score(completion, 1, {})
    assert result.error is not None
    assert error in result.error
    assert await pool.score("interrupt", 2, {}) == ScoreResult(reward=2.0)


async def test_time_limit_ends_the_code_and_its_children(start: Start, tmp_path: Path) -> None:
    pool, file = start(timeout_seconds=2.0), tmp_path / "shared" / "namespace"
    result = await pool.score("hang", 1, {"pid": str(file)})
    assert result == ScoreResult(reward=FALLBACK, error="no answer within 2 s")
    namespace = file.read_text()
    await wait_until(lambda: not is_inhabited(namespace), message="its child lives on")
    assert await pool.score("", 2, {}) == ScoreResult(reward=2.0)


async def test_one_that_hangs_delays_no_other(start: Start, tmp_path: Path) -> None:
    pool = start()
    row = {"pid": str(tmp_path / "shared" / "pid"), "open": str(tmp_path / "open")}
    hanging = asyncio.create_task(pool.score("gate", 1, row))
    await wait_until((tmp_path / "shared" / "pid").exists, message="no request arrived")
    results = await asyncio.gather(*(pool.score("", number, {}) for number in range(10)))
    assert [result.reward for result in results] == list(range(10))
    assert not hanging.done()
    (tmp_path / "open").touch()
    assert await hanging == ScoreResult(reward=99.0)


async def test_an_answer_whose_process_is_killed_is_scored_by_another(
    start: Start, tmp_path: Path
) -> None:
    pool = start(workers=1)
    row = {"pid": str(tmp_path / "shared" / "pid"), "open": str(tmp_path / "open")}
    asking = asyncio.create_task(pool.score("gate", 1, row))
    await wait_until((tmp_path / "shared" / "pid").exists, message="no request arrived")
    template = pool._server._process  # pyright: ignore[reportPrivateUsage]
    assert template is not None
    (tmp_path / "open").touch()
    os.kill(template.pid, signal.SIGKILL)
    assert await asking == ScoreResult(reward=99.0)
    assert await pool.score("", 2, {}) == ScoreResult(reward=2.0)


_SLOW = """
import time
from pathlib import Path

loading = Path("{folder}") / "loading"
if not loading.exists():
    loading.touch()
    time.sleep(600)

def reward(completion, answer, row):
    return answer
"""


async def test_a_reward_whose_process_is_killed_while_it_loads_is_loaded_by_another(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(_SLOW.format(folder=tmp_path / "shared"))
    pool = start(function=f"{tmp_path}/slow.py:reward")
    asking = asyncio.create_task(pool.score("", 2, {}))
    await wait_until((tmp_path / "shared" / "loading").exists, message="nothing is loaded")
    template = pool._server._process  # pyright: ignore[reportPrivateUsage]
    assert template is not None
    os.kill(template.pid, signal.SIGKILL)
    assert await asking == ScoreResult(reward=2.0)


async def test_a_process_that_is_ending_is_followed_by_another(start: Start) -> None:
    """A killed process takes a while to end, in which nothing can be forked from it."""
    pool = start(workers=1)
    await pool.start()
    template = pool._server  # pyright: ignore[reportPrivateUsage]
    process, control = template._process, template._control  # pyright: ignore
    assert process is not None
    assert control is not None
    os.kill(process.pid, signal.SIGSTOP)
    control.shutdown(socket.SHUT_RDWR)
    assert await pool.score("", 2, {}) == ScoreResult(reward=2.0)


async def test_an_answer_that_ends_two_processes_gets_the_fallback(
    start: Start, tmp_path: Path
) -> None:
    pool = start(workers=1)
    row = {"file": str(tmp_path / "shared" / "tries")}
    assert (await pool.score("count and exit", 1, row)).reward == FALLBACK
    assert (tmp_path / "shared" / "tries").read_text() == "xx"


async def test_cancelled_request_does_not_answer_the_next(start: Start, tmp_path: Path) -> None:
    pool = start(workers=1)
    row = {"pid": str(tmp_path / "shared" / "pid"), "open": str(tmp_path / "open")}
    asking = asyncio.create_task(pool.score("gate", 1, row))
    await wait_until((tmp_path / "shared" / "pid").exists, message="no request arrived")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    (tmp_path / "open").touch()
    assert await pool.score("", 2, {}) == ScoreResult(reward=2.0)


async def test_every_kind_of_value_reaches_the_function(start: Start) -> None:
    row: dict[str, Any] = {"long": 10**30, "nested": [{"a": None}], "text": "\x00ü", "x": 1.5}
    assert await start().score("ü" * 200_000, 1, row) == ScoreResult(reward=2.5)


async def test_answers_are_scored_at_once_by_async_functions(start: Start) -> None:
    pool = start("slow", workers=16)
    await pool.start()
    began = time.monotonic()
    results = await asyncio.gather(*(pool.score("", None, {}) for _ in range(32)))
    assert [result.reward for result in results] == [1.0] * 32
    # one after the other they take 16 s
    assert time.monotonic() - began < 8.0


async def test_a_function_of_many_answers_gets_them_together(start: Start) -> None:
    pool = start("many", workers=1, batch_size=4, on_error=None)
    await pool.start()

    async def score(*completions: str) -> list[ScoreResult]:
        return await asyncio.gather(
            *(pool.score(text, 1, {}, {"length": lambda: 10}) for text in completions)
        )

    assert [result.reward for result in await score(*"abcd")] == [14.0] * 4
    assert [result.error for result in await score("a", "raise")] == ["KeyError: 'x'"] * 2
    assert [result.error for result in await score("few", "a")] == ["1 rewards for 2 answers"] * 2


async def test_refuses_a_verifier_that_cannot_be_loaded(tmp_path: Path) -> None:
    spec = RewardSpec(kind="function", function="no.such:name", on_error=FALLBACK)
    pool = RewardPool(spec, tmp_path / "reward.log")
    line = "reward.function: no.such cannot be imported: ModuleNotFoundError: No module named 'no'"
    with pytest.raises(ConfigError) as error:
        await pool.start()
    assert str(error.value) == line
    assert await pool.score("", 1, {}) == ScoreResult(reward=FALLBACK, error=line)
    await asyncio.sleep(0)
