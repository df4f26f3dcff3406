"""Read tasks of a verifiers taskset: `taskset:`, `taskset:0:1000` or `taskset:?split=test`.

The interpreter that has the taskset reads them. What follows the question mark is configuration of
the taskset, in place of what `environment.taskset` says, and matters for reading alone.
"""

import signal
import subprocess
from collections.abc import Iterator
from tempfile import TemporaryFile
from typing import IO, Any
from urllib.parse import parse_qsl

import msgspec

from tlt.base.child_process import die_with_parent, last_line
from tlt.base.verifiers_interpreter import runner_command, runner_variables
from tlt.errors import DataError
from tlt.spec.data_and_algorithm import TASKSET
from tlt.spec.prompt_files import Environment

_tasks = msgspec.json.Decoder(dict[str, Any])


def task_rows(source: str, environment: Environment) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each task with its location: its text, its answer if it has one, and all of it."""
    if not environment or environment.python is None:
        raise DataError(f"{source}: it needs an environment of kind verifiers")
    span, _, query = source.removeprefix(TASKSET).partition("?")
    start, stop = _span(source, span)
    own = {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}
    settings = {
        "env": {**environment.env, "taskset": {**environment.verifiers_taskset, **own}},
        "start": start,
        "stop": stop,
    }
    with TemporaryFile() as log, _started(environment.python, log) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        try:
            running.stdin.write(msgspec.json.encode(settings))
            running.stdin.close()
            for number, line in enumerate(running.stdout, start=start):
                try:
                    row = _tasks.decode(line)
                except msgspec.MsgspecError as error:
                    raise DataError(f"{source}: task {number}: not valid JSON: {error}") from error
                if "error" in row:
                    raise DataError(f"{source}: {row['error']}")
                yield f"{source}: task {number}", row
            if running.wait():
                log.seek(0)
                raise DataError(f"{source}: {environment.python}: {last_line(log.read())}")
        except BrokenPipeError as error:
            log.seek(0)
            complaint = f"{environment.python} ended: {last_line(log.read())}"
            raise DataError(f"{source}: {complaint}") from error
        finally:
            running.kill()


def _started(python: str, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            runner_command(python, "tasks"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=runner_variables(python),
            preexec_fn=die_with_parent(signal.SIGKILL),
        )
    except OSError as error:
        raise DataError(f"environment.python: {python}: {error.strerror}") from error


def _span(source: str, text: str) -> tuple[int, int | None]:
    """Return the range of tasks, whose end may be open."""
    first, separator, end = text.partition(":")
    try:
        start, stop = int(first or 0), int(end) if end else None
    except ValueError:
        raise DataError(f"{source}: write a range as in {TASKSET}0:1000") from None
    if (first and not separator) or start < 0 or (stop is not None and stop <= start):
        raise DataError(f"{source}: write a range as in {TASKSET}0:1000")
    return start, stop


def _value(text: str) -> Any:
    """Read JSON, or a text as it is."""
    try:
        return msgspec.json.decode(text)
    except ValueError:
        return text
