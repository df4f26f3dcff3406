"""Tasks of verifiers run in the interpreter that has it, with turns that a rank has written."""

import asyncio
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from msgspec.structs import replace

from tests.environments.conversing import Conversing, conversing, environment_spec, prompts
from tests.waiting import wait_until
from tlt.blobs.answer_files import Answer
from tlt.data.verifiers_tasks import task_rows
from tlt.environments.environment_messages import RunAgent
from tlt.environments.verifiers_pool import VerifiersPool
from tlt.errors import ConfigError, DataError
from tlt.spec.config import DataSpec, JobSpec
from tlt.spec.environment import EnvironmentSpec

_ROOT = Path(__file__).parents[2]
_LOCK = _ROOT / "requirements" / "verifiers.lock"
_TASKSET = Path(__file__).parent / "digits_taskset.py"

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]


@pytest.fixture(scope="session")
def python() -> str:
    """Return an interpreter that has verifiers and the taskset; it is made once for each lock."""
    mark = hashlib.sha256(_LOCK.read_bytes()).hexdigest()[:12]
    folder = _ROOT / ".venv" / f"verifiers-{mark}"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            pip = [folder / "bin" / "pip", "install", "--quiet", "--no-deps", "-r", _LOCK]
            subprocess.run(pip, check=True)
            (folder / "done").touch()
    (packages,) = folder.glob("lib/python*/site-packages")
    shutil.copy(_TASKSET, packages)
    return str(folder / "bin" / "python")


@pytest.fixture
def section(python: str, tmp_path: Path) -> EnvironmentSpec:
    return EnvironmentSpec(
        kind="verifiers",
        python=python,
        taskset=_TASKSET.stem,
        env={"agent": {"runtime": {"type": "subprocess"}}},
        # verifiers' own folder is in the home, and its log in the environment's
        writable=(str(Path.home() / ".cache"), str(tmp_path)),
        memory_gb=8.0,
        isolation="available",
    )


def spec_of(folder: Path, section: EnvironmentSpec, **changes: Any) -> JobSpec:
    data = DataSpec(train="taskset:0:3")
    return replace(environment_spec(folder), environment=replace(section, **changes), data=data)


async def held(
    folder: Path,
    spec: JobSpec,
    ranks: int = 1,
    meanwhile: Callable[[Conversing], None] = lambda found: None,
) -> dict[Any, Answer]:
    rows = [row for _, row in task_rows("taskset:0:3", spec.environment)]
    async with conversing(folder, spec, ranks) as found:
        begun = prompts(spec, folder, rows)
        found.begin(begun)
        while len(found.finished) < len(begun):
            await found.advance()
            meanwhile(found)
        return await found.until_finished(len(begun))


async def test_episodes_are_answers(tmp_path: Path, section: EnvironmentSpec) -> None:
    """They are the same with more ranks, and after somebody has killed the process."""
    alone = await held(tmp_path / "a", spec_of(tmp_path / "a", section))
    for (prompt, _), answer in alone.items():
        # the second request goes on from the first
        assert not answer.branches
        assert len(answer.policy_turns) == 2
        said = "".join(turn.text for turn in answer.turns if turn.role == "assistant")
        digits = sum(each.isdigit() for each in said)
        if prompt == 2:
            assert "no world" in str(answer.error)
        else:
            assert answer.error is None
            assert answer.reward == digits / 2
            assert answer.metrics == {"digits": digits, "turns": 2.0}
    mark, killed = tmp_path / "mark", list[int]()

    def kill(found: Conversing) -> None:
        if mark.exists():
            if not killed:
                killed.extend(runners(section))
                for process in killed:
                    os.kill(process, signal.SIGKILL)
            mark.unlink()

    marked = spec_of(tmp_path / "b", section, taskset={"id": _TASKSET.stem, "mark": str(mark)})
    others = await held(tmp_path / "b", marked, ranks=2, meanwhile=kill)
    assert killed
    for key, answer in alone.items():
        assert others[key].tokens == answer.tokens
        assert others[key].reward == answer.reward


async def test_an_episode_that_nobody_waits_for_ends(
    tmp_path: Path, section: EnvironmentSpec
) -> None:
    mark = tmp_path / "mark"
    marked = replace(section, taskset={"id": _TASKSET.stem, "mark": str(mark)})
    row = next(task_rows("taskset:", marked))[1]
    pool = VerifiersPool(marked, tmp_path / "log")
    try:
        process = await pool.take()
        request = RunAgent(row=row, seed=0, socket="", token="", counts=True)
        call = asyncio.create_task(process.call(request))
        await wait_until(mark.exists)
        call.cancel()
        await asyncio.wait([call])
        pool.put_back(process)
        await wait_until((tmp_path / "mark-given-up").exists)
    finally:
        pool.stop()


def test_tasks_are_rows(section: EnvironmentSpec) -> None:
    rows = dict(task_rows("taskset:3:9?prompt=7%2B&count=4", section))
    ((where, row),) = rows.items()
    assert where == "taskset:3:9?prompt=7%2B&count=4: task 3"
    assert row["prompt"] == row["task"]["prompt"] == "7+"
    assert row["answer"] == row["task"]["answer"] == "3"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"taskset": {"id": _TASKSET.stem, "colour": 1}}, "colour"),
        ({"python": sys.executable}, "has no verifiers: install it there"),
        ({"python": "/nowhere/python"}, "No such file"),
    ],
)
def test_says_why_there_are_no_tasks(
    section: EnvironmentSpec, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint):
        list(task_rows("taskset:", replace(section, **changes)))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"taskset": "nowhere"}, "taskset 'nowhere' not found"),
        ({"python": sys.executable}, "has no verifiers: install it there"),
        ({"python": "/nowhere/python"}, "No such file"),
    ],
)
async def test_says_why_a_taskset_cannot_be_loaded(
    tmp_path: Path, section: EnvironmentSpec, changes: dict[str, Any], complaint: str
) -> None:
    pool = VerifiersPool(replace(section, **changes), tmp_path / "log")
    try:
        with pytest.raises(ConfigError, match=complaint):
            await pool.start()
    finally:
        pool.stop()


def runners(section: EnvironmentSpec) -> list[int]:
    """Return the processes that run episodes with this interpreter."""
    found = subprocess.run(
        ["pgrep", "-f", f"^{section.python} -P .*verifiers_runner.py serve"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [int(line) for line in found.stdout.split()]
