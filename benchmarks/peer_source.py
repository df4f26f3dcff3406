"""Compile parts of a peer's installed source, where they are no functions that can be called."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def run_statements(method: Callable[..., Any], first: str, last: str, names: dict[str, Any]) -> Any:
    """Run a method's statements, from the one that begins with `first` to that with `last`.

    They read and set `names`.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    found = [part for block in _blocks(tree) if (part := _between(block, first, last))]
    if not found:
        raise LookupError(f"{method.__qualname__} has no statements '{first}' to '{last}'")
    # the innermost block that has both
    exec(compile(ast.Module(found[-1], []), method.__qualname__, "exec"), names)
    return names


def load_function(module: str, name: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Compile one function or method of a module whose imports aren't installed."""
    package, _, file = module.rpartition(".")
    found = find_spec(package)
    assert found is not None
    assert found.submodule_search_locations is not None
    path = Path(found.submodule_search_locations[0]) / f"{file}.py"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            exec(compile(ast.Module([node], []), str(path), "exec"), names)
            return names[name]
    raise LookupError(f"{path} has no function '{name}'")


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for block in ("body", "orelse"):
            if isinstance(statements := getattr(node, block, None), list):
                yield statements


def _between(block: list[ast.stmt], first: str, last: str) -> list[ast.stmt]:
    texts = [ast.unparse(statement) for statement in block]
    start = next((i for i, text in enumerate(texts) if text.startswith(first)), None)
    end = next((i for i, text in enumerate(texts) if text.startswith(last)), None)
    return [] if start is None or end is None else block[start : end + 1]
