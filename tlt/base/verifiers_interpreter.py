"""Start the program that runs tasks of verifiers, with the interpreter that has them."""

import os
from pathlib import Path

_RUNNER = Path(__file__).parents[1] / "environments" / "verifiers_runner.py"
# of our interpreter, and wrong for another
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def runner_command(python: str, what: str) -> tuple[str, ...]:
    """Return the command: safe from modules of ours beside the program."""
    return (python, "-P", str(_RUNNER), what)


def runner_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OURS}
