"""Read the code's calls, and the numbered paths of ARCHITECTURE.md, from their text.

`Code` takes edits, so that a test can show that a path no longer holds once a call is gone.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = "ARCHITECTURE.md"
# files that carry messages without telling them apart: a union that they name is all its members
CARRIERS = {"tlt/ranks/worker_channel.py", "tlt/actors/coordinator/coordinator.py"}
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

    @property
    def calls(self) -> tuple[Call, ...]:
        """Return the functions of the entry."""
        return self.call, *self.below


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def _walk(text: str) -> list[ast.AST]:
    return list(ast.walk(_parse(text)))


def names_in(*nodes: ast.AST) -> set[str]:
    """Return the names and attributes in a piece of code."""
    found = [child for node in nodes for child in ast.walk(node)]
    names = {child.id for child in found if isinstance(child, ast.Name)}
    return names | {child.attr for child in found if isinstance(child, ast.Attribute)}


class Code:
    """The sources under `ROOT`, some of them edited."""

    def __init__(self, edits: Mapping[str, str] | None = None) -> None:
        self._edits = edits or {}
        self._bindings: dict[str, dict[str, set[str]]] = {}
        self._imported: dict[str, dict[str, str]] = {}

    def text(self, path: str) -> str:
        """Return a file's text."""
        return self._edits.get(path) or (ROOT / path).read_text()

    def entries(self, heading: str) -> list[Entry]:
        """Return the numbered entries below a heading of the page."""
        section = self.text(PAGE).partition(f"## {heading}\n")[2].partition("\n## ")[0]
        found: list[Entry] = []
        for item in re.findall(r"^\d+\. .+\n(?:^ +\S.*\n?)*", section, re.MULTILINE):
            calls = [Call(*found) for found in re.findall(r"`(tlt/[\w/]+\.py):([\w.]+)`", item)]
            message = re.search(r"→ `(\w+)`", item)
            found.append(
                Entry(int(item.split(".")[0]), calls[0], calls[1:], message and message[1])
            )
        return found

    def faults(self, heading: str) -> Iterator[str]:
        """Return what a path says and the code doesn't."""
        listed = self.entries(heading)
        for entry in listed:
            for index, call in enumerate(entry.below, 1):
                if not any(self.reaches(caller, call) for caller in entry.calls[:index]):
                    yield f"{call} is called by none"
        for entry, following in pairwise(listed):
            if entry.message is None:
                if not any(self.reaches(call, following.call) for call in entry.calls):
                    yield f"{entry} ↛ {following}"
                continue
            if not any(self.makes(call, entry.message) for call in entry.calls):
                yield f"{entry} doesn't make it"
            if not self.handles(following.call, entry.message):
                yield f"{following} doesn't read {entry.message}"

    def functions(self, path: str) -> dict[str, Function]:
        """Return a file's functions, methods as `Class.method`."""
        found: dict[str, Function] = {}
        for node in _parse(self.text(path)).body:
            if isinstance(node, Function):
                found[node.name] = node
            if isinstance(node, ast.ClassDef):
                methods = (member for member in node.body if isinstance(member, Function))
                found |= {f"{node.name}.{method.name}": method for method in methods}
        return found

    def reached(self, call: Call) -> list[Function]:
        """Return a function and the functions of its file that it calls."""
        known = self.functions(call.path)
        waiting, seen = [call.function], dict[str, Function]()
        while waiting:
            current = waiting.pop()
            seen[current] = known[current]
            names = names_in(known[current])
            called = (other for other in known if other.rpartition(".")[2] in names)
            waiting += [other for other in called if other not in seen]
        return list(seen.values())

    def makes(self, call: Call, message: str) -> bool:
        """Return True if the function names the message, or carries it."""
        return message in names_in(*self.reached(call)) or self._carries(call, message)

    def handles(self, call: Call, message: str) -> bool:
        """Return True if the function carries the message, or tells it from others.

        A function that matches messages has to have a case for it.
        """
        reached = self.reached(call)
        patterns = [
            child
            for function in reached
            for child in ast.walk(function)
            if isinstance(child, ast.MatchClass)
        ]
        cases = names_in(*(pattern.cls for pattern in patterns))
        named = message in (cases if cases & self.messages() else names_in(*reached))
        return named or self._carries(call, message)

    def messages(self) -> set[str]:
        """Return the names of the structs of tlt/protocol."""
        return {node.name for node in self._protocol() if isinstance(node, ast.ClassDef)}

    def reaches(self, caller: Call, called: Call) -> bool:
        """Return True if the caller calls this function, and not another one of its name."""
        owner, _, name = called.function.rpartition(".")
        nodes = [child for function in self.reached(caller) for child in ast.walk(function)]
        if not owner:
            return any(self._is_function(caller.path, node, called.path, name) for node in nodes)
        return any(
            isinstance(node, ast.Attribute)
            and node.attr == name
            and any(
                kind == owner or self._fulfils(called.path, owner, kind)
                for kind in self._kinds(caller.path, node.value)
            )
            for node in nodes
        )

    def _protocol(self) -> list[ast.stmt]:
        files = sorted((ROOT / "tlt" / "protocol").glob("*.py"))
        paths = [str(file.relative_to(ROOT)) for file in files]
        return [node for path in paths for node in _parse(self.text(path)).body]

    def _carries(self, call: Call, message: str) -> bool:
        if call.path not in CARRIERS:
            return False
        unions = {
            node.target.id: names_in(node.value)
            for node in self._protocol()
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.value is not None
        }
        members, waiting = set[str](), names_in(*self.reached(call)) & set(unions)
        while waiting:
            members |= waiting
            waiting = set[str]().union(*(unions.get(name, ()) for name in waiting)) - members
        return message in members

    def _imports(self, path: str) -> dict[str, str]:
        """Return the file or the name in a file (`file.py:name`) that each import stands for."""
        if path in self._imported:
            return self._imported[path]
        found = self._imported[path] = dict[str, str]()
        for node in _walk(self.text(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tlt"):
                folder = (node.module or "").replace(".", "/")
                for alias in node.names:
                    module, package = f"{folder}/{alias.name}.py", f"{folder}/__init__.py"
                    target = f"{folder}.py:{alias.name}"
                    if (ROOT / module).exists():
                        target = module
                    elif (ROOT / package).exists() and path != package:
                        target = self._imports(package).get(alias.name, target)
                    found[alias.asname or alias.name] = target
        return found

    def _is_function(self, path: str, node: ast.AST, home: str, name: str) -> bool:
        match node:
            case ast.Name(id=alias):
                inside = path == home and alias == name
                return inside or self._imports(path).get(alias) == f"{home}:{name}"
            case ast.Attribute(value=ast.Name(id=module), attr=attribute):
                return attribute == name and self._imports(path).get(module) == home
            case _:
                return False

    def _fulfils(self, path: str, owner: str, protocol: str) -> bool:
        """Return True if the class has the methods of this protocol of the engines."""
        if protocol != "Engine":
            return False
        wanted = self.functions("tlt/engine/base.py")
        methods = [name for name in wanted if name.startswith("Engine.")]
        known = self.functions(path)
        return all(name.replace("Engine", owner, 1) in known for name in methods)

    def _kinds(self, path: str, value: ast.expr) -> set[str]:
        """Return the classes that an expression may be of, by the annotations of its last name."""
        match value:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                here = self._bound(path)
                if name in here:
                    return here[name]
                imported = {target.partition(":")[0] for target in self._imports(path).values()}
                files = [file for file in imported if (ROOT / file).exists()]
                return {name}.union(*(self._bound(file).get(name, set()) for file in files))
            case ast.Call(func=ast.Name(id=name)) if name not in ("zip", "enumerate", "reversed"):
                return {name} | self._bound(path).get(name, set())
            case ast.Call(func=ast.Name(), args=arguments):
                return set[str]().union(*(self._kinds(path, each) for each in arguments))
            case ast.Call(func=ast.Attribute(value=inner)):
                return self._kinds(path, inner)
            case ast.Subscript(value=inner) | ast.Await(value=inner):
                return self._kinds(path, inner)
            case _:
                return set()

    def _bound(self, path: str) -> dict[str, set[str]]:
        """Return the names in a file's annotations and constructors, by what they annotate."""
        if path in self._bindings:
            return self._bindings[path]
        found = self._bindings[path] = dict[str, set[str]]()
        later: list[tuple[ast.expr, ast.expr]] = []

        def bind(target: ast.expr, kinds: set[str]) -> None:
            if kinds:
                for name in names_in(target) - {"self"}:
                    found.setdefault(name, set()).update(kinds)

        for node in _walk(self.text(path)):
            match node:
                case ast.AnnAssign(target=target, annotation=annotation):
                    bind(target, names_in(annotation))
                case ast.arg(arg=name, annotation=ast.expr() as annotation):
                    found.setdefault(name, set()).update(names_in(annotation))
                case ast.FunctionDef(name=name, returns=ast.expr() as annotation):
                    found.setdefault(name, set()).update(names_in(annotation))
                case ast.Assign(targets=[target], value=value):
                    later.append((target, value))
                case ast.For(target=target, iter=value):
                    later.append((target, value))
                case _:
                    pass
        for target, value in later:
            bind(target, self._kinds(path, value))
        return found
