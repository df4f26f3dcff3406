"""ARCHITECTURE.md describes the code as it is.

An entry of its numbered lists is `path:function`; `→ Message` at its end names the struct of
tlt/protocol by which it reaches the next entry, which handles it or carries it on.
"""

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
WAYS = {"A prompt becomes new weights": 38, "An idle worker trains a drafter": 24}
ENTERED_AGAIN = {
    "tlt/policies/coordinator.py",
    "tlt/actors/worker.py",
    "tlt/actors/incarnation.py",
    "tlt/ranks/main.py",
    "tlt/ranks/worker_channel.py",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Entry(NamedTuple):
    number: int
    path: str
    # `function` or `Class.method`
    function: str
    # the struct by which it reaches the next entry, where that isn't a call
    message: str | None


def entries(heading: str) -> list[Entry]:
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found: list[Entry] = []
    for item in re.findall(r"^\d+\. (?:.+\n?)(?:^ {3}.+\n?)*", section, re.MULTILINE):
        parsed = re.match(r"(\d+)\. `([\w/]+\.py):([\w.]+)`", item)
        assert parsed is not None, f"not an entry: {item}"
        message = re.search(r"→ `(\w+)`\s*$", item)
        found.append(Entry(int(parsed[1]), parsed[2], parsed[3], message and message[1]))
    return found


@cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


@cache
def functions(path: str) -> dict[str, Function]:
    """Return a file's functions, methods as `Class.method`."""
    found: dict[str, Function] = {}
    for node in tree(path).body:
        if isinstance(node, Function):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            methods = (member for member in node.body if isinstance(member, Function))
            found |= {f"{node.name}.{method.name}": method for method in methods}
    return found


@cache
def mentioned(path: str, function: str) -> set[str]:
    """Return the names in a function and in the functions of its file that it reaches."""
    names, waiting, seen = set[str](), [function], set[str]()
    while waiting:
        current = waiting.pop()
        seen.add(current)
        new = names_in(functions(path)[current]) - names
        names |= new
        reached = (other for other in functions(path) if other.rpartition(".")[2] in new)
        waiting += [other for other in reached if other not in seen]
    return names


def names_in(node: ast.AST) -> set[str]:
    found = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return found | {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}


@cache
def messages() -> set[str]:
    files = (ROOT / "tlt" / "protocol").glob("*.py")
    bodies = [node for file in files for node in ast.parse(file.read_text()).body]
    return {node.name for node in bodies if isinstance(node, ast.ClassDef)}


def names_of(entry: Entry) -> set[str]:
    """Return the names by which another function can reach this one: its own and its class's."""
    return set(entry.function.split(".")) - {"__init__"}


@pytest.mark.parametrize("heading", WAYS)
def test_entries_exist_and_are_numbered(heading: str) -> None:
    listed = entries(heading)
    assert [entry.number for entry in listed] == list(range(1, len(listed) + 1))
    for entry in listed:
        assert entry.function in functions(entry.path), f"{entry.path} has no {entry.function}"
        assert entry.message is None or entry.message in messages()


@pytest.mark.parametrize("heading", WAYS)
def test_begins_and_ends_where_it_says(heading: str) -> None:
    listed = entries(heading)
    assert listed[-1].function == "decide" or "drafter" in heading
    assert len({entry.path for entry in listed}) <= WAYS[heading]


@pytest.mark.parametrize("heading", WAYS)
def test_goes_in_one_direction(heading: str) -> None:
    listed = entries(heading)
    turns = [a.path for a, b in pairwise(listed) if a.path != b.path] + [listed[-1].path]
    again = {path for path in turns if turns.count(path) > 1}
    assert again <= ENTERED_AGAIN


@pytest.mark.parametrize("heading", WAYS)
def test_each_step_reaches_the_next(heading: str) -> None:
    listed = entries(heading)
    carried = None
    for entry, following in pairwise(listed):
        here = mentioned(entry.path, entry.function)
        if entry.message is None:
            assert here & names_of(following), f"{entry} doesn't call {following.function}"
        else:
            assert entry.message in here or entry.message == carried, f"{entry}: doesn't make it"
            handled = entry.message in names_in(tree(following.path))
            assert handled or following.message == entry.message, f"{following}: doesn't read it"
        carried = entry.message
