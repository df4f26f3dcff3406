"""ARCHITECTURE.md describes the code as it is.

A numbered entry is `path:function`. It ends with `→ Message` if it reaches the next entry by a
struct of tlt/protocol instead of a call; the next entry handles or forwards that struct. The items
under an entry are functions that it calls, or that call each other.
"""

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MARKDOWN = sorted(path for pattern in ("*.md", "docs/**/*.md") for path in ROOT.glob(pattern))
# largest number of files in a path
PATHS = {"From a prompt to new weights": 38, "From an idle worker to an adopted drafter": 24}
# the decider, the worker's actor, the rank's loop with its drafter training, and the channel
# between them
ENTERED_AGAIN = {
    "tlt/policies/coordinator.py",
    "tlt/actors/worker_message_router.py",
    "tlt/ranks/main.py",
    "tlt/ranks/drafter_member.py",
    "tlt/ranks/worker_channel.py",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Call(NamedTuple):
    path: str
    # `function` or `Class.method`
    function: str


class Entry(NamedTuple):
    number: int
    call: Call
    below: list[Call]
    # the struct by which it reaches the next entry; None for a call
    message: str | None


def entries(heading: str) -> list[Entry]:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found: list[Entry] = []
    for item in re.findall(r"^\d+\. .+\n(?:^ +\S.*\n?)*", section, re.MULTILINE):
        calls = [Call(*found) for found in re.findall(r"`(tlt/[\w/]+\.py):([\w.]+)`", item)]
        message = re.search(r"→ `(\w+)`", item)
        found.append(Entry(int(item.split(".")[0]), calls[0], calls[1:], message and message[1]))
    return found


@cache
def names_in_file(path: str) -> set[str]:
    return names_in(ast.parse((ROOT / path).read_text()))


@cache
def functions(path: str) -> dict[str, Function]:
    """Return a file's functions, methods as `Class.method`."""
    found: dict[str, Function] = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, Function):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            methods = (member for member in node.body if isinstance(member, Function))
            found |= {f"{node.name}.{method.name}": method for method in methods}
    return found


@cache
def names_reached(call: Call) -> set[str]:
    """Return the names in a function and in the functions of its file that it calls."""
    names, waiting, seen = set[str](), [call.function], set[str]()
    while waiting:
        current = waiting.pop()
        seen.add(current)
        names |= names_in(functions(call.path)[current])
        called = (other for other in functions(call.path) if other.rpartition(".")[2] in names)
        waiting += [other for other in called if other not in seen]
    return names


def names_in(node: ast.AST) -> set[str]:
    found = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return found | {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}


@cache
def messages() -> set[str]:
    files = (ROOT / "tlt" / "protocol").glob("*.py")
    bodies = [node for file in files for node in ast.parse(file.read_text()).body]
    return {node.name for node in bodies if isinstance(node, ast.ClassDef)}


def reaches(caller: Call, called: Call) -> bool:
    """Return True if the caller names the function, or makes an instance of its class."""
    return bool(names_reached(caller) & set(called.function.split(".")))


@pytest.mark.parametrize("heading", PATHS)
def test_entries_exist_and_are_numbered(heading: str) -> None:
    listed = entries(heading)
    assert [entry.number for entry in listed] == list(range(1, len(listed) + 1))
    for entry in listed:
        for call in (entry.call, *entry.below):
            assert call.function in functions(call.path), call
        assert entry.message is None or entry.message in messages(), entry


@pytest.mark.parametrize("heading", PATHS)
def test_a_path_enters_few_files_and_none_twice(heading: str) -> None:
    listed = entries(heading)
    assert listed
    visits = [[call.path for call in (entry.call, *entry.below)] for entry in listed]
    entered = [path for visit in visits for path in dict.fromkeys(visit)]
    again = {path for path in entered if entered.count(path) > 1}
    assert again <= ENTERED_AGAIN
    assert len(set(entered)) <= PATHS[heading]


@pytest.mark.parametrize("heading", PATHS)
def test_each_entry_calls_what_stands_under_it(heading: str) -> None:
    for entry in entries(heading):
        above = [entry.call]
        for call in entry.below:
            assert any(reaches(caller, call) for caller in above), f"{call} is called by none"
            above.append(call)


@pytest.mark.parametrize("heading", PATHS)
def test_each_entry_reaches_the_next(heading: str) -> None:
    carried = None
    for entry, following in pairwise(entries(heading)):
        calls = (entry.call, *entry.below)
        if entry.message is None:
            assert any(reaches(call, following.call) for call in calls), f"{entry} ↛ {following}"
        else:
            made = any(entry.message in names_reached(call) for call in calls)
            assert made or entry.message == carried, f"{entry} doesn't make it"
            handled = entry.message in names_in_file(following.call.path)
            assert handled or entry.message == following.message, f"{following} doesn't read it"
        carried = entry.message


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_on_a_page_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`((?:tlt|cli|benchmarks|docs|examples|tests|configs)/[\w./*-]+)[:`]", text)
    linked = re.findall(r"\]\(([^)#:]+)(?:#[\w-]*)?\)", text)
    missing = [path for path in named if not any(ROOT.glob(path.rstrip("/")))]
    missing += [link for link in linked if not (page.parent / link).exists()]
    assert not missing
