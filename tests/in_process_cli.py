"""Run a command in this process: one of its own takes seconds to start."""

import contextlib
import io
from typing import NamedTuple

from cli.main import app


class Outcome(NamedTuple):
    code: int
    stdout: str
    stderr: str


def run_command(*arguments: str) -> Outcome:
    """Run `tlt` with these arguments, and return what it printed and its exit code."""
    stdout, stderr = io.StringIO(), io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            app(list(arguments))
        except SystemExit as ended:
            code = ended.code
    if isinstance(code, str):
        stderr.write(f"{code}\n")
        code = 1
    return Outcome(code if isinstance(code, int) else 0, stdout.getvalue(), stderr.getvalue())
