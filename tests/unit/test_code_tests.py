"""A program passes if it does what the tests say, and can't do anything else."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tlt.rewards.kinds.code_tests import extract_program
from tlt.rewards.process.reward_pool import RewardPool
from tlt.rewards.reward_messages import ScoreResult
from tlt.spec.reward import RewardSpec

ADD = "def add(a, b):\n    return a + b"
DOUBLE = "print(int(input()) * 2)"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RewardPool]:
    spec = RewardSpec(kind="code", timeout_seconds=10)
    pool = RewardPool(spec, tmp_path_factory.mktemp("code") / "log", 2)
    yield pool
    await pool.stop()


def fenced(program: str, language: str = "python") -> str:
    return f"<think>```python\nwrong\n```</think>So:\n```{language}\n{program}\n```\nThat is it."


PAIRS = {"inputs": ["3\n", "4"], "outputs": ["6", "8\n"]}
CALLS = {"inputs": ["1\n2", [3, 4]], "outputs": ["3", [7]], "fn_name": "add"}


LISTED = [{"input": "3", "output": "6", "testtype": "stdin"}, {"input": "4", "output": "8"}]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("program", "answer", "row", "reward"),
    [
        (ADD, "assert add(1, 2) == 3", {}, 1),
        (ADD, ["assert add(1, 2) == 3", "assert add(0, 0) == 1"], {}, 0),
        (ADD, "def check(f):\n    assert f(1, 2) == 3", {"entry_point": "add"}, 1),
        (ADD, "def check(f):\n    assert f(1, 2) == 4", {"entry_point": "add"}, 0),
        (DOUBLE, PAIRS, {}, 1),
        (DOUBLE, json.dumps(PAIRS), {}, 1),
        (DOUBLE, PAIRS | {"outputs": ["6", "9"]}, {}, 0),
        (DOUBLE, {"inputs": ["1"], "outputs": ["2.0"]}, {}, 1),
        (DOUBLE, {"inputs": ["1"], "outputs": ["2 0"]}, {}, 0),
        (ADD, CALLS, {}, 1),
        (f"class Solution:\n    {ADD.replace('(a', '(self, a').replace(chr(10), chr(10) + '    ')}",
         CALLS, {}, 1),
        (ADD, CALLS | {"outputs": ["3", 8]}, {}, 0),
        # as where such tasks come from
        ("class Solution:\n    def add(self, a: int, b: int) -> List[int]:\n"
         "        return math.floor(pow(sum(deque([a, b])), 1, 100))", CALLS, {}, 1),
        # as verl's preprocessors write them
        (DOUBLE, json.dumps({"inputs": [["1"], "2\n"], "outputs": [["2"], "4\n"]}), {}, 1),
        (DOUBLE, PAIRS | {"fn_name": None, "functional": None}, {}, 1),
        (ADD, json.dumps(CALLS), {}, 1),
        (ADD, json.dumps({"functional": "assert add(1, 2) == 3"}), {}, 1),
        (ADD, json.dumps({"functional": "assert add(1, 2) == 4"}), {}, 0),
        (ADD, {"assert_case": ["assert add(1, 2) == 3", "assert add(0, 0) == 1"]}, {}, 0),
        (ADD, json.dumps(["assert add(1, 2) == 3", "assert add(0, 0) == 0"]), {}, 1),
        (ADD, "[x for x in ()]\nassert add(1, 2) == 3", {}, 1),
        (ADD, {"inputs": [["a", "b"]], "outputs": ["ab"], "fn_name": "add"}, {}, 1),
        (ADD, {"inputs": [[1, 2]], "outputs": ["3"], "fn_name": "add"}, {}, 1),
        (DOUBLE, json.dumps(LISTED), {}, 1),
        (DOUBLE, [*LISTED, {"input": "3", "output": "5"}], {}, 0),
        (ADD, [{"input": "1\n2", "output": "3", "metadata": {"func_name": "add"}}], {}, 1),
        (ADD, [{"input": [1, 2], "output": [4], "fn_name": "add"}], {}, 0),
        ("import numpy\nadd = numpy.add", "assert add(1, 2) == 3", {}, 1),
        # ends before the tests do
        ("import os\nos._exit(0)", "assert False", {}, 0),
        ("import sys\nsys.exit(0)", "assert False", {}, 0),
        ("def add(", "pass", {}, 0),
        ("1 / 0", "pass", {}, 0),
        ("", "assert add(1, 2) == 3", {}, 0),
        # what it may not do
        ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "pass", {}, 0),
        ("open('/root/.bashrc', 'w')", "pass", {}, 0),
        (f"open({str(Path(__file__))!r})", "pass", {}, 0),
        ("open('mine', 'w').write('x')", "pass", {}, 1),
        ("bytearray(4_000_000_000)", "pass", {}, 0),
        # how it may try to pass without passing
        ("import __main__, os, sys\nos.write(int(sys.argv[1]), __main__.word.encode())",
         "assert False", {}, 0),
        ("import builtins\nbuiltins.compile = builtins.exec = lambda *_: None",
         "assert False", {}, 0),
        ("open('tests.py', 'w').write('pass')", "assert False", {}, 0),
        ("import os\nos.symlink('/etc/hostname', 'output')\nprint(open('program.py').read()[:0])",
         {"inputs": [""], "outputs": ["x"]}, {}, 0),
        ("import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')", "pass", {}, 1),
        ("import os, signal\nos.kill(os.getppid(), signal.SIGINT)", "pass", {}, 1),
        ("def add(a, b):\n    return 10 ** 400", CALLS | {"outputs": [1.5, 1.5]}, {}, 0),
        ("def add(a, b):\n    return list(range(20_000))",
         CALLS | {"inputs": [[1, 2]], "outputs": [list(range(20_000))]}, {}, 1),
    ],
)  # fmt: skip
async def test_runs_a_program_against_tests(
    pool: RewardPool, program: str, answer: Any, row: dict[str, Any], reward: float
) -> None:
    assert await pool.score(fenced(program), answer, row) == ScoreResult(reward=reward)


@pytest.mark.parametrize(
    ("program", "seconds"),
    [
        ("while True: pass", 2),
        ("while True: print('x' * 1000)", 2),
        ("import subprocess\nsubprocess.Popen(['sleep', '9'], start_new_session=True).wait()", 2),
        # to end so many takes time where others compute
        ("import os\nwhile True: os.fork()", 12),
    ],
)
async def test_a_program_without_end_fails_and_the_next_one_passes(
    program: str, seconds: float, tmp_path: Path
) -> None:
    spec = RewardSpec(kind="code", timeout_seconds=seconds, workers=1)
    pool = RewardPool(spec, tmp_path / "log")
    try:
        assert await pool.score(fenced(program), "pass", {}) == ScoreResult(reward=0.0)
        assert await pool.score(fenced("x = 1"), "assert x == 1", {}) == ScoreResult(reward=1.0)
    finally:
        await pool.stop()


async def test_a_program_sees_no_variable_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    pool = RewardPool(RewardSpec(kind="code", workers=1), tmp_path / "log")
    program = "import os\nnames = set(os.environ)"
    try:
        result = await pool.score(fenced(program), "assert 'PATH' in names", {})
        hidden = await pool.score(fenced(program), "assert 'WANDB_API_KEY' not in names", {})
    finally:
        await pool.stop()
    assert result == hidden == ScoreResult(reward=1.0)


async def test_partial_is_the_share_of_the_tests_that_pass(tmp_path: Path) -> None:
    pool = RewardPool(RewardSpec(kind="code", partial=True), tmp_path / "log")
    tests = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add(2, 2) == 4"]
    try:
        result = await pool.score(fenced(ADD), tests, {})
    finally:
        await pool.stop()
    assert result.reward == pytest.approx(2 / 3)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "answer", ["", [], {"inputs": [], "outputs": []}, 7, None, "{", "[]", "{}"]
)
async def test_a_row_without_tests_is_an_error(pool: RewardPool, answer: Any) -> None:
    result = await pool.score(fenced(ADD), answer, {})
    assert result.reward is None
    assert result.error is not None


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("```py\nx = 1\n```\n```text\n7\n```", "x = 1"),
        ("```python\nx = 1\n```\nbetter:\n```python\nx = 2\n```", "x = 2"),
        ("```python\nx = 1", "x = 1"),
    ],
)
def test_the_program_is_the_last_block(text: str, program: str) -> None:
    assert extract_program(text) == program
