"""Start the program that runs tasks of verifiers, with the interpreter that has them."""

import os
from pathlib import Path

_RUNNER = Path(__file__).parents[1] / "environments" / "verifiers_runner.py"
# they name what belongs to our interpreter
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def runner_command(python: str, what: str) -> tuple[str, ...]:
    """Return the command: safe from modules of ours beside the program."""
    return (python, "-P", str(_RUNNER), what)


def runner_variables(python: str) -> dict[str, str]:
    """Return its environment: its own programs come first, and no proxy stands between us."""
    variables = {name: value for name, value in os.environ.items() if name not in _OURS}
    for name in ("NO_PROXY", "no_proxy"):
        variables[name] = f"{variables.get(name, '')},127.0.0.1".lstrip(",")
    if "/" in python:
        variables["PATH"] = f"{os.path.dirname(python)}:{variables.get('PATH', os.defpath)}"
    return variables
