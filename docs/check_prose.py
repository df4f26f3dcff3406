"""Fail on docstrings that begin with a lone relative word, and on a README that is too long.

`python docs/check_prose.py [PATH ...]` checks the given files and folders; without arguments it
checks all Python of the repository, and README.md, tables and code included.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tlt", "cli", "examples", "benchmarks", "tests", "docs")
README_WORDS = 700
# fmt: off
RELATIVE = frozenset((
    "of", "whether", "who", "whom", "whose", "what", "which", "that", "how", "when", "where", "why",
    "whoever", "whichever", "wherever", "and", "by", "as", "with", "without", "from", "for", "to",
    "in", "until", "while", "once", "before", "so", "because", "if", "those",
))
# fmt: on
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def python_files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def docstring_complaints(path: Path) -> Iterator[str]:
    """Name every docstring of a file that begins with one of the relative words."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, Documented):
            continue
        text = ast.get_docstring(node)
        first = re.match(r"[A-Za-z]+", text or "")
        if first is not None and first[0].lower() in RELATIVE:
            name = getattr(node, "name", "the module")
            line = node.body[0].lineno
            yield f"{path}:{line}: {name}: a docstring doesn't begin with '{first[0]}'"


def main(arguments: list[str]) -> int:
    paths = [Path(name) for name in arguments or FOLDERS]
    complaints = [line for path in python_files(paths) for line in docstring_complaints(path)]
    if not arguments:
        words = len((ROOT / "README.md").read_text().split())
        if words > README_WORDS:
            complaints.append(f"README.md: {words} words; at most {README_WORDS}")
    print("\n".join(complaints), end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
