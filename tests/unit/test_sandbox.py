"""Every request gets a result in time, even if the user's code fails or hangs."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until
from tlt.config import RewardSpec
from tlt.errors import ConfigError
from tlt.rewards.reward_process_client import RewardSandbox
from tlt.rewards.reward_process_main import ScoreResult

FALLBACK = -0.5
CODE = """
import os, subprocess, sys, time
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
        case "sys.exit": sys.exit(3)
        case "hang":
            child = subprocess.Popen(["sleep", "600"])
            Path(row["pid"]).write_text(str(child.pid))
            time.sleep(600)
        case "print": print("printed")
        case "gate":
            Path(row["pid"]).write_text(str(os.getpid()))
            while not Path(row["open"]).exists(): time.sleep(0.005)
            return 99
    return answer + row.get("x", 0)
"""


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[RewardSandbox]:
    (tmp_path / "own.py").write_text(CODE)
    spec = RewardSpec(
        kind="function", function=f"{tmp_path}/own.py:reward", on_error=FALLBACK, timeout_seconds=30
    )
    sandbox = RewardSandbox(spec, tmp_path / "logs" / "reward.log")
    yield sandbox
    sandbox.stop()
    await asyncio.sleep(0)  # the loop closes the link


async def test_scores_answers_one_after_the_other(sandbox: RewardSandbox, tmp_path: Path) -> None:
    for number in range(5):
        assert await sandbox.score("", number, {"x": 0.25}) == ScoreResult(reward=number + 0.25)
    assert await sandbox.score("print", 1, {}) == ScoreResult(reward=1.0)
    sandbox.stop()
    log = (tmp_path / "logs" / "reward.log").read_text()
    assert log.splitlines() in (["imported"], ["imported", "printed"])


@pytest.mark.parametrize(
    ("completion", "error"),
    [
        ("raise", "KeyError: 'x'"),
        ("nan", "the reward is nan"),
        ("inf", "the reward is inf"),
        ("none", "TypeError: "),
        ("word", "ValueError: could not convert string to float: 'many'"),
        ("exit", "the reward's process ended"),
        ("sys.exit", "the reward's process ended"),
    ],
)
async def test_failure_gets_the_fallback_and_the_next_answer_is_scored(
    completion: str, error: str, sandbox: RewardSandbox
) -> None:
    result = await sandbox.score(completion, 1, {})
    assert result.reward == FALLBACK
    assert result.error is not None
    assert result.error.startswith(error)
    assert await sandbox.score("", 2, {}) == ScoreResult(reward=2.0)


async def test_time_limit_ends_the_code_and_its_children(
    sandbox: RewardSandbox, tmp_path: Path
) -> None:
    spec = RewardSpec(
        kind="function",
        function=f"{tmp_path}/own.py:reward",
        on_error=FALLBACK,
        timeout_seconds=0.4,
    )
    hasty = RewardSandbox(spec, tmp_path / "reward.log")
    await hasty.start()
    pid = tmp_path / "pid"
    result = await hasty.score("hang", 1, {"pid": str(pid)})
    assert result == ScoreResult(reward=FALLBACK, error="no answer within 0.4 s")
    if pid.exists() and (text := pid.read_text()):  # or it was ended before it started a child
        await wait_until(lambda: not _is_alive(int(text)), message="its child lives on")
    assert await hasty.score("", 2, {}) == ScoreResult(reward=2.0)
    hasty.stop()
    await asyncio.sleep(0)


async def test_killed_process_gets_the_fallback_and_the_next_answer_is_scored(
    sandbox: RewardSandbox, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    row = {"pid": str(pid), "open": str(tmp_path / "never")}
    asking = asyncio.create_task(sandbox.score("gate", 1, row))
    await wait_until(lambda: pid.exists() and pid.read_text(), message="no request arrived")
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert await asking == ScoreResult(reward=FALLBACK, error="the reward's process ended")
    assert await sandbox.score("", 2, {}) == ScoreResult(reward=2.0)


async def test_cancelled_request_does_not_answer_the_next(
    sandbox: RewardSandbox, tmp_path: Path
) -> None:
    row = {"pid": str(tmp_path / "pid"), "open": str(tmp_path / "open")}
    asking = asyncio.create_task(sandbox.score("gate", 1, row))
    await wait_until((tmp_path / "pid").exists, message="no request arrived")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    (tmp_path / "open").touch()
    assert await sandbox.score("", 2, {}) == ScoreResult(reward=2.0)


async def test_every_kind_of_value_reaches_the_function(sandbox: RewardSandbox) -> None:
    row: dict[str, Any] = {"long": 10**30, "nested": [{"a": None}], "text": "\x00ü", "x": 1.5}
    assert await sandbox.score("ü" * 200_000, 1, row) == ScoreResult(reward=2.5)


async def test_refuses_a_verifier_that_cannot_be_loaded(tmp_path: Path) -> None:
    spec = RewardSpec(kind="function", function="no.such:name", on_error=FALLBACK)
    sandbox = RewardSandbox(spec, tmp_path / "reward.log")
    line = "reward.function: no.such cannot be imported: ModuleNotFoundError: No module named 'no'"
    with pytest.raises(ConfigError) as error:
        await sandbox.start()
    assert str(error.value) == line
    assert await sandbox.score("", 1, {}) == ScoreResult(reward=FALLBACK, error=line)
    await asyncio.sleep(0)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
