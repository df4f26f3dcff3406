"""Fail on files above 400 lines, and on classes of the core that have outgrown one task.

`python docs/check_structure.py [PATH ...]` checks the given files and folders; without arguments
it checks every Python and JavaScript file of the repository that isn't vendored.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tlt", "cli", "examples", "benchmarks", "tests", "docs")
CORE = ("tlt/policies", "tlt/ranks", "tlt/actors")
FILE_LINES = 400
CLASS_METHODS = 12
CLASS_ATTRIBUTES = 19
Function = ast.FunctionDef | ast.AsyncFunctionDef


def source_files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (f for f in found if f.suffix in (".py", ".js") and "vendor" not in f.parts)


def attributes_of(cls: ast.ClassDef) -> set[str]:
    """Name a class's declared fields and what its methods assign on `self`."""
    fields = {
        member.target.id
        for member in cls.body
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name)
    }
    return fields | {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def class_complaints(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = sum(isinstance(member, Function) for member in node.body)
        attributes = len(attributes_of(node))
        here = f"{path}:{node.lineno}: {node.name}"
        if methods > CLASS_METHODS:
            yield f"{here}: {methods} methods; at most {CLASS_METHODS}"
        if attributes > CLASS_ATTRIBUTES:
            yield f"{here}: {attributes} attributes; at most {CLASS_ATTRIBUTES}"


def complaints_of(path: Path) -> Iterator[str]:
    lines = len(path.read_text().splitlines())
    if lines > FILE_LINES:
        yield f"{path}: {lines} lines; at most {FILE_LINES}"
    full = path.resolve()
    if path.suffix == ".py" and any(full.is_relative_to(ROOT / folder) for folder in CORE):
        yield from class_complaints(path)


def main(arguments: list[str]) -> int:
    paths = [Path(name) for name in arguments or FOLDERS]
    complaints = [line for path in source_files(paths) for line in complaints_of(path)]
    print("\n".join(complaints), end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
