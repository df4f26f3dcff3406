"""Run a program that a model wrote against tests, in the sandbox that this process is in.

Tests are those of a row's answer: Python text or a list of it (MBPP, HumanEval), or inputs and
outputs (APPS, TACO, LiveCodeBench), for the program's standard input or for its function `fn_name`.
All of it may be JSON text, as verl's data has it.
"""

import json
import math
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

import msgspec

from tlt.data.dataset import Row
from tlt.isolation.landlock import restrict_files
from tlt.isolation.limits import end_others, readable_system, remove_folder
from tlt.spec.reward import RewardSpec

_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_PYTHON = frozenset({"python", "py", "python3"})
# the time limit ends this process, so programs get a little less
_SHARE = 0.8
_MOST_OUTPUT = 1 << 20
# relative error of numbers in an output
_TOLERANCE = 1e-6

# Runs tests after the program, and says the word at the end. Both came before the program ran, and
# neither is in a global variable or a file; a program that searches the frames finds them.
_ASSERTS = """
import json, os, sys

def main():
    word, tests = json.loads(sys.stdin.read())
    channel, write, run = int(sys.argv[1]), os.write, exec
    with open("program.py", encoding="utf-8") as file:
        parts = [compile(file.read(), "program.py", "exec"), compile(tests, "tests.py", "exec")]
    scope = {"__name__": "__main__"}
    for part in parts:
        run(part, scope)
    sys.stdout.flush()
    write(channel, word.encode())

main()
"""
# Calls the program's function, and says what it returned. The names that the sites have imported
# from which such tasks come are there: their signatures need `List`.
_CALL = """
import json, os, sys

GIVEN = '''
import bisect, collections, functools, heapq, itertools, math, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from typing import *
'''

def main():
    word, name, arguments = json.loads(sys.stdin.read())
    channel, write, encode = int(sys.argv[1]), os.write, json.dumps
    with open("program.py", encoding="utf-8") as file:
        program = compile(file.read(), "program.py", "exec")
    scope = {"__name__": "program"}
    exec(GIVEN, scope)
    exec(program, scope)
    function = scope.get(name) or getattr(scope["Solution"](), name)
    rest = memoryview(encode([word, function(*arguments)]).encode())
    while rest:
        rest = rest[write(channel, rest):]

main()
"""


class _Pairs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs and outputs; arguments of a function are JSON, one a line or in a list."""

    inputs: list[Any]
    outputs: list[Any]
    fn_name: str | None = None


class _Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One input and its output, as LiveCodeBench lists them."""

    input: Any
    output: Any
    fn_name: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def function(self) -> str | None:
        return self.fn_name or (self.metadata or {}).get("func_name")


class _Asserts(msgspec.Struct, frozen=True, kw_only=True):
    """Python text under the names that verl's tools know it by."""

    functional: str | None = None
    assert_case: list[str] | None = None

    @property
    def tests(self) -> list[str]:
        return [self.functional] if self.functional is not None else self.assert_case or []


class _Run(NamedTuple):
    status: int
    output: bytes
    # what came on the channel whose number it was given
    said: bytes


def complain_of_tests(answer: Any, row: Row) -> str | None:
    """Say why a row's tests can't be run, and run none; None if they can."""
    runner = _Runner(Path(), 0.0)
    try:
        tests = runner.tests(answer, row)
        with warnings.catch_warnings(action="ignore"):
            for test in tests:
                if test.func == runner.run_asserts:
                    compile(test.args[0], "tests.py", "exec")
    except (ValueError, SyntaxError, RecursionError, MemoryError, msgspec.ValidationError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


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
            for passes in runner.tests(answer, row):
                outcomes.append(_holds(passes))
                if not outcomes[-1] and not self._partial:
                    return 0.0
            return sum(outcomes) / len(outcomes)
        finally:
            end_others()
            remove_folder(folder)


def _holds(passes: Callable[[], bool]) -> bool:
    """Return False whatever goes wrong once a program runs: it may have caused it."""
    try:
        return passes()
    except (OSError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return False


def extract_program(text: str) -> str:
    """Return the last fenced block of Python, or of no language, or else the whole text."""
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

    def tests(self, answer: Any, row: Row) -> list[partial[bool]]:
        """Return the tests; raise ValueError if there are none."""
        answer = _decoded(answer)
        if isinstance(answer, dict):
            asserts = msgspec.convert(answer, _Asserts).tests
            if not asserts:
                return self._compared(msgspec.convert(answer, _Pairs))
            answer = asserts
        if isinstance(answer, list) and answer and all(isinstance(each, dict) for each in answer):
            pairs = msgspec.convert(answer, list[_Pair])
            return [self._passes(each.input, each.output, each.function) for each in pairs]
        tests = msgspec.convert([answer] if isinstance(answer, str) else answer, list[str])
        if not any(test.strip() for test in tests):
            raise ValueError("the answer holds no tests: text, a list of it, or inputs and outputs")
        entry = row.get("entry_point")
        if isinstance(entry, str):
            calls = f"\ncheck({entry})\n"
            tests = [test + calls if "def check(" in test else test for test in tests]
        return [partial(self.run_asserts, test) for test in tests]

    def _compared(self, pairs: _Pairs) -> list[partial[bool]]:
        if not pairs.inputs or len(pairs.inputs) != len(pairs.outputs):
            raise ValueError("the answer needs as many inputs as outputs, and one at least")
        return [
            self._passes(given, expected, pairs.fn_name)
            for given, expected in zip(pairs.inputs, pairs.outputs, strict=True)
        ]

    def _passes(self, given: Any, expected: Any, function: str | None) -> partial[bool]:
        if function is None:
            return partial(self._prints, given, expected)
        return partial(self._returns, given, expected, function)

    def run_asserts(self, test: str) -> bool:
        word = secrets.token_hex(16)
        run = self._run(["-c", _ASSERTS], json.dumps([word, test]).encode())
        return run is not None and run.said == word.encode()

    def _returns(self, given: Any, expected: Any, name: str) -> bool:
        arguments, accepted = given, [expected]
        if isinstance(given, str):
            arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
        if isinstance(expected, str):
            # where the arguments aren't JSON text, it may be the very text that is returned
            accepted = [] if isinstance(given, str) else accepted
            accepted = [*accepted, *_json_values(expected)]
        word = secrets.token_hex(16)
        run = self._run(["-c", _CALL], json.dumps([word, name, arguments]).encode())
        if run is None:
            return False
        said, returned = json.loads(run.said)
        # some sets wrap the one value that is returned
        values = (returned, [returned])
        return said == word and any(_equal(a, b) for a in values for b in accepted)

    def _prints(self, given: Any, expected: Any) -> bool:
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
        folder = str(self._folder)
        # without names, so that no program can put something else in their place
        with TemporaryFile() as output, TemporaryFile() as said:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", *arguments, str(said.fileno())],
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LC_ALL": "C.UTF-8"},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.DEVNULL,
                pass_fds=(said.fileno(),),
                preexec_fn=lambda: _restrict_program(folder),
                start_new_session=True,
            )
            try:
                process.communicate(given, timeout=left)
            except subprocess.TimeoutExpired:
                return None
            finally:
                process.kill()
                process.wait()
                end_others()
            found = [_read_some(file) for file in (output, said)]
        printed, heard = found
        if printed is None or heard is None:
            return None
        return _Run(process.returncode, printed, heard)


def _decoded(answer: Any) -> Any:
    """Return what JSON text holds, and other text as it is."""
    if not isinstance(answer, str) or not answer.lstrip().startswith(("{", "[")):
        return answer
    try:
        return json.loads(answer)
    except ValueError:
        if answer.lstrip().startswith("{"):
            raise
        return answer


def _json_values(text: str) -> list[Any]:
    """Return the value of JSON text, or nothing."""
    try:
        return [json.loads(text)]
    except ValueError:
        return []


def _read_some(file: IO[bytes]) -> bytes | None:
    """Return what is in a file, or None if it is too much."""
    file.seek(0)
    content = file.read(_MOST_OUTPUT + 1)
    return content if len(content) <= _MOST_OUTPUT else None


def _restrict_program(folder: str) -> None:
    """Leave it its folder and the interpreter, and no look into this process."""
    restrict_files([folder, "/dev/null"], readable_system())
    # many of them may not keep this process from ending them
    os.nice(19)


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
