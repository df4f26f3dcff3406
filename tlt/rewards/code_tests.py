"""Run a program that a model wrote against tests, in the sandbox that this process is in.

Tests are those of a row's answer: Python text or a list of it (MBPP, HumanEval), or inputs and
outputs (APPS, LiveCodeBench), for the program's standard input or for its function `fn_name`.
"""

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tlt.dataset import Row
from tlt.reward_spec import RewardSpec
from tlt.rewards.isolation import readable_system
from tlt.rewards.landlock import restrict_files

_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_PYTHON = frozenset({"python", "py", "python3"})
_THOUGHT = "</think>"
# the time limit ends this process, so programs get a little less
_SHARE = 0.8
_MOST_OUTPUT = 1 << 20
# relative error of numbers in an output
_TOLERANCE = 1e-6

# runs tests after the program; only what comes to its end says the word
_ASSERTS = """
import os, sys
word = sys.stdin.readline()
scope = {"__name__": "__main__"}
for name in ("program.py", "tests.py"):
    exec(compile(open(name, encoding="utf-8").read(), name, "exec"), scope)
sys.stdout.flush()
os.write(int(sys.argv[1]), word.encode())
"""
# calls the program's function, and says what it returned
_CALL = """
import json, os, sys
word, name, arguments = sys.stdin.readline().strip(), *json.loads(sys.stdin.readline())
scope = {"__name__": "program"}
exec(compile(open("program.py", encoding="utf-8").read(), "program.py", "exec"), scope)
function = scope.get(name) or getattr(scope["Solution"](), name)
os.write(int(sys.argv[1]), json.dumps([word, function(*arguments)]).encode())
"""


class _Pairs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs and outputs; arguments of a function are JSON, one a line or in a list."""

    inputs: list[Any]
    outputs: list[Any]
    fn_name: str | None = None


class _Run(NamedTuple):
    status: int
    output: bytes
    # what came on the channel whose number it was given
    said: bytes


class CodeTests:
    """Return 1 if a program passes all tests, or with `partial` the share that it passes."""

    def __init__(self, spec: RewardSpec) -> None:
        self._seconds = _SHARE * spec.timeout_seconds
        self._partial = spec.partial

    def __call__(self, text: str, answer: Any, row: Row, /) -> float:
        folder = Path(tempfile.mkdtemp())
        try:
            (folder / "program.py").write_text(extract_program(text), encoding="utf-8")
            runner = _Runner(folder, time.monotonic() + self._seconds)
            outcomes: list[bool] = []
            for passed in runner.outcomes(answer, row):
                outcomes.append(passed)
                if not passed and not self._partial:
                    return 0.0
            return sum(outcomes) / len(outcomes)
        finally:
            _end_others()
            shutil.rmtree(folder, ignore_errors=True)


def extract_program(text: str) -> str:
    """Return the last fenced block of Python, or of no language, or else the whole text."""
    text = text.rpartition(_THOUGHT)[2]
    blocks = [(match[1].lower(), match[2]) for match in _FENCE.finditer(text)]
    for languages in (_PYTHON, {""}):
        found = [block for language, block in blocks if language in languages]
        if found:
            return found[-1]
    return text


class _Runner:
    def __init__(self, folder: Path, deadline: float) -> None:
        self._folder = folder
        self._deadline = deadline

    def outcomes(self, answer: Any, row: Row) -> Iterator[bool]:
        """Yield whether each test passes; raise ValueError if there are none."""
        if isinstance(answer, str) and answer.lstrip().startswith("{"):
            answer = json.loads(answer)
        if isinstance(answer, dict):
            pairs = msgspec.convert(answer, _Pairs)
            if not pairs.inputs or len(pairs.inputs) != len(pairs.outputs):
                raise ValueError("the answer needs as many inputs as outputs, and one at least")
            passes = self._returns if pairs.fn_name is not None else self._prints
            for given, expected in zip(pairs.inputs, pairs.outputs, strict=True):
                yield passes(given, expected, pairs.fn_name or "")
            return
        tests = msgspec.convert([answer] if isinstance(answer, str) else answer, list[str])
        if not any(test.strip() for test in tests):
            raise ValueError("the answer holds no tests: text, a list of it, or inputs and outputs")
        entry = row.get("entry_point")
        for test in tests:
            if isinstance(entry, str) and "def check(" in test:
                test += f"\ncheck({entry})\n"
            yield self._asserts(test)

    def _asserts(self, test: str) -> bool:
        (self._folder / "tests.py").write_text(test, encoding="utf-8")
        word = secrets.token_hex(16)
        run = self._run(["-c", _ASSERTS], f"{word}\n".encode())
        return run is not None and run.said.decode(errors="replace").strip() == word

    def _returns(self, given: Any, expected: Any, name: str) -> bool:
        arguments = given
        if isinstance(given, str):
            arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
        if isinstance(expected, str):
            expected = json.loads(expected)
        word = secrets.token_hex(16)
        run = self._run(["-c", _CALL], f"{word}\n{json.dumps([name, arguments])}\n".encode())
        if run is None:
            return False
        try:
            said, returned = json.loads(run.said)
        except ValueError:
            return False
        # some sets wrap the one value that is returned
        return said == word and (_equal(returned, expected) or _equal([returned], expected))

    def _prints(self, given: Any, expected: Any, _: str) -> bool:
        given, expected = (
            "\n".join(map(str, each)) if isinstance(each, list) else str(each)
            for each in (given, expected)
        )
        run = self._run(["program.py"], given.encode())
        if run is None or run.status != 0:
            return False
        return _same_text(run.output.decode(errors="replace"), expected)

    def _run(self, arguments: Sequence[str], given: bytes) -> _Run | None:
        """Run Python in the folder; return None if it takes too long or says too much."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return None
        folder, output = str(self._folder), self._folder / "output"
        reads, writes = os.pipe()
        with output.open("wb") as target, os.fdopen(reads, "rb") as said:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-B", *arguments, str(writes)],
                    cwd=folder,
                    env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LC_ALL": "C.UTF-8"},
                    stdin=subprocess.PIPE,
                    stdout=target,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(writes,),
                    preexec_fn=lambda: _restrict_program(folder),
                    start_new_session=True,
                )
            finally:
                os.close(writes)
            try:
                process.communicate(given, timeout=left)
            except subprocess.TimeoutExpired:
                return None
            finally:
                process.kill()
                process.wait()
                _end_others()
            heard = said.read(_MOST_OUTPUT)
        if output.stat().st_size > _MOST_OUTPUT:
            return None
        return _Run(process.returncode, output.read_bytes(), heard)


def _restrict_program(folder: str) -> None:
    """Leave it its folder and the interpreter, and no look into this process."""
    restrict_files([folder, "/dev/null"], readable_system())
    # many of them may not keep this process from ending them
    os.nice(19)


def _end_others() -> None:
    """End all that programs have started: this is the first process of a namespace."""
    with contextlib.suppress(ProcessLookupError):
        while os.getpid() == 1:
            os.kill(-1, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)


def _same_text(found: str, expected: str) -> bool:
    """Compare line by line; numbers may differ in their last digits, spaces don't count."""
    ours, theirs = (
        [line.split() for line in text.strip().splitlines() if line.strip()]
        for text in (found, expected)
    )
    return len(ours) == len(theirs) and all(
        len(one) == len(other) and all(map(_same_word, one, other))
        for one, other in zip(ours, theirs, strict=True)
    )


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if "." not in expected and "e" not in expected.lower():
        return False
    try:
        return math.isclose(float(found), float(expected), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except ValueError:
        return False


def _equal(found: Any, expected: Any) -> bool:
    """Compare what JSON holds; integers and floats may be equal."""
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(_equal, found, expected))
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, float) or isinstance(expected, float):
        return (
            isinstance(found, int | float)
            and isinstance(expected, int | float)
            and math.isclose(found, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        )
    return type(found) is type(expected) and found == expected
