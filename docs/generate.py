"""Write the pages that are made from the code: docs/benchmarks.md, docs/cli.md and docs/spec.md.

`python docs/generate.py [PAGE ...]` writes them; with `--check` it fails where one is out of date.
The marks of old results are left out of that comparison: they depend on the commits that follow.
"""

import argparse
import ast
import enum
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import typer
from typer.models import OptionInfo, ParameterInfo

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT))

NOTE = "<!-- Written by docs/generate.py: change what it reads, and run `make docs`. -->\n"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Lay out a table in Markdown; cells may hold line ends and bars."""
    lines = [head, tuple("---" for _ in head), *rows]
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


# --- benchmarks


MOST_COMMITS = 150
OLD = f", **more than {MOST_COMMITS} commits ago**"


def old_mark(commit: str, file: Path, root: Path = ROOT) -> str:
    """Mark a result that was measured more than `MOST_COMMITS` commits ago.

    Where history lacks its commit, as after a rebase, the last change of its file counts.
    """
    measured = commit.removesuffix("+changes")
    if git(root, "merge-base", measured, "HEAD") != measured:
        measured = git(root, "log", "-1", "--format=%H", "HEAD", "--", str(file))
    since = git(root, "rev-list", "--count", f"{measured}..HEAD") if measured else ""
    return OLD if since and int(since) > MOST_COMMITS else ""


def git(root: Path, *arguments: str) -> str:
    """Return what git prints, or nothing where it fails or isn't installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def benchmarks_page() -> str:
    """List what each benchmark claims, and what its committed result says."""
    from benchmarks.catalogue import BENCHMARKS

    parts = [
        NOTE,
        "# Benchmarks\n",
        "Every figure comes from a script; `make bench` runs all of them, `tlt bench NAME` one, and"
        " `tlt bench` shows this table in a terminal. All of them ran on two CPU cores or one,"
        " without a GPU: ratios carry over to another machine of the kind, absolute times don't."
        " A claim holds where the measured value is on the right side of the bar. A result that was"
        f" measured more than {MOST_COMMITS} commits ago is marked.\n",
    ]
    results = {file.stem: file for file in (ROOT / "benchmarks" / "results").glob("*.json")}
    for name in sorted(results, key=lambda name: catalogue_place(name, list(BENCHMARKS))):
        result = json.loads(results[name].read_bytes())
        about = BENCHMARKS.get(name) or f"Another run of `{result['name']}`, on its own."
        parts += benchmark_section(results[name], about, result)
    if missing := [f"`{name}`" for name in BENCHMARKS if name not in results]:
        parts.append(f"Not measured yet: {', '.join(missing)}.\n")
    return "\n".join(parts)


def catalogue_place(name: str, known: list[str]) -> tuple[int, str]:
    """Order a further run (`speculation_16`) directly after the benchmark that it belongs to."""
    belongs = [index for index, stem in enumerate(known) if name.startswith(stem)]
    return max(belongs, default=len(known)), name


def benchmark_section(file: Path, about: str, result: dict[str, Any]) -> Iterator[str]:
    name, host, commit = file.stem, result["host"], result["commit"]
    yield f"## {name}\n\n{about}\n"
    yield (
        f"{host['cpu']}, {host['cores']} core{'s' if host['cores'] > 1 else ''},"
        f" {host['gpu'] or 'no GPU'}; torch {host['torch']}, Python {host['python']};"
        f" commit {commit[:8]}{'+changes' if commit.endswith('+changes') else ''}"
        f"{old_mark(commit, file)}"
        f"; {result['seconds']:.0f} s;"
        f" [`{name}.json`](../benchmarks/results/{name}.json)\n"
    )
    for key, at in result["details"].items():
        if key.endswith("_measured_at"):
            yield f"Its {key.removesuffix('_measured_at')}: commit {at[:8]}{old_mark(at, file)}.\n"
    rows: list[tuple[str, ...]] = []
    for claim in result["claims"]:
        sign, unit = ("≤" if claim["less_is_better"] else "≥"), claim["unit"]
        measured = f"{claim['value']:.4g} {unit}".strip()
        verdict = "yes" if claim["holds"] else "**no**"
        rows.append((claim["name"], f"{sign} {claim['bar']:g}", measured, verdict))
    yield table(("claim", "bar", "measured", "holds"), rows)


# --- the command line


def cli_page() -> str:
    """Describe every command with its arguments and options, from the same source as `--help`."""
    from cli.main import app

    parts = [
        NOTE,
        "# Commands\n",
        "`tlt COMMAND --help` shows the same. Exit codes: 0 ok, 1 a job failed, 2 wrong usage or"
        " input, 3 no session.\n",
    ]
    for words, function in commands_of(app, "tlt"):
        parts += command_section(words, function)
    return "\n".join(parts)


def commands_of(app: typer.Typer, words: str) -> Iterator[tuple[str, Callable[..., object]]]:
    for command in app.registered_commands:
        if command.callback is not None:
            name = command.name or command.callback.__name__.replace("_", "-")
            yield f"{words} {name}", command.callback
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from commands_of(group.typer_instance, f"{words} {group.name}")


def command_section(words: str, function: Callable[..., object]) -> Iterator[str]:
    hints = get_type_hints(function, include_extras=True)
    arguments: list[tuple[str, ...]] = []
    options: list[tuple[str, ...]] = []
    usage: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        kind, *rest = get_args(hints[name]) or (hints[name],)
        about = next((info for info in rest if isinstance(info, ParameterInfo)), None)
        if about is None or about.hidden:
            continue
        optional = parameter.default is not inspect.Parameter.empty
        meaning = one_line(about.help)
        if isinstance(about, OptionInfo):
            given = option_usage(name, kind, about)
            options.append((given, with_default(meaning, parameter.default if optional else None)))
        else:
            shown = str(about.metavar or name).upper() + ("..." if "list" in str(kind) else "")
            usage.append(f"[{shown}]" if optional else shown)
            arguments.append((f"`{shown}`", meaning))
    yield f"## {words}\n\n`{' '.join([words, *(['[OPTIONS]'] if options else []), *usage])}`\n"
    yield one_line(function.__doc__) + "\n"
    if arguments or options:
        yield table(("argument, option", "meaning"), arguments + options)


def option_usage(name: str, kind: Any, about: OptionInfo) -> str:
    flag = f"--{name.replace('_', '-')}"
    # typer.Option takes its first name for a default until a command is built
    names = (str(about.default), *(about.param_decls or ()))
    declared = [text for text in names if text.startswith("-")]
    text = kind_name(kind)
    if text == "bool":
        return ", ".join(f"`{each}`" for each in declared or (flag, f"--no-{flag[2:]}"))
    value = about.metavar or (text if "/" in text else text.upper())
    return ", ".join(f"`{each}`" for each in declared or [flag]) + f" {value}"


def kind_name(kind: Any) -> str:
    """Name the type of an option's value: the choices, or one word."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "/".join(str(member.value) for member in kind)
    inner = [each for each in get_args(kind) if each is not type(None)]
    if inner and isinstance(inner[0], str):
        return "/".join(inner)
    return kind_name(inner[0]) if inner else getattr(kind, "__name__", str(kind))


def with_default(meaning: str, default: object) -> str:
    if isinstance(default, bool) or default in (None, "") or callable(default):
        return meaning
    shown = default.value if isinstance(default, enum.Enum) else default
    if isinstance(default, Path) and default.is_relative_to(ROOT):
        shown = default.relative_to(ROOT)
    return f"{meaning} Default: `{shown}`.".strip()


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


# --- the spec


_SPEC_MODULES = (
    "config.py",
    "environment.py",
    "rollout.py",
    "data_and_algorithm.py",
    "reward.py",
)


def spec_page() -> str:
    """Describe every key of a job's spec: type, default, bounds and meaning."""
    from tlt.spec import config
    from tlt.spec.section import section_of

    sources = [(ROOT / "tlt" / "spec" / name).read_text() for name in _SPEC_MODULES]
    nodes = [node for source in sources for node in ast.parse(source).body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    comments = {key: text for source in sources for key, text in field_comments(source).items()}
    parts = [
        NOTE,
        "# The spec of a job\n",
        "A YAML file of these sections. `tlt config show SPEC` prints every key with its value,"
        " `tlt config check SPEC` reads the data, too; `--set section.key=value` changes one."
        " Paths are relative to the spec's folder. An unknown key is refused, with the nearest"
        " known one.\n",
    ]
    for key, cls in sections_of(config.JobSpec):
        description = one_line(ast.get_docstring(classes[cls.__name__]))
        parts.append(f"## {key or 'Top level'}\n\n{description}\n")
        bounds, rules = bounds_of(classes[cls.__name__])
        rows: list[tuple[str, ...]] = []
        for field in msgspec.structs.fields(cls):
            meaning = comments.get((cls.__name__, field.name), "")
            if section_of(field.type) is not None:
                anchor = f"{key}{field.name}".replace(".", "")
                absent = field.default is None
                kind = _section_kind(field.type)
                default = "null" if absent else ""
                if str in get_args(field.type):
                    kind, default = "text or list of sections", default_of(field)
                rows.append((f"[`{field.name}`](#{anchor})", kind, default, "", meaning))
                continue
            default = default_of(field)
            row = (type_of(field.type), default, bounds.get(field.name, ""), meaning)
            rows.append((f"`{field.name}`", *row))
        parts.append(table(("key", "type", "default", "bounds", "meaning"), rows))
        if rules:
            parts.append("A spec is also refused for these reasons:\n")
            parts.append("\n".join(f"- {rule}" for rule in rules) + "\n")
    return "\n".join(parts)


def _section_kind(kind: Any) -> str:
    """Name what a field that may hold sections may hold."""
    from tlt.spec.section import holds_named_sections

    if isinstance(kind, type):
        return "section"
    if holds_named_sections(kind):
        return "text, or sections by name, or null"
    if msgspec.UnsetType in get_args(kind):
        return "section"
    return "section or null" if type(None) in get_args(kind) else "section or list of sections"


def sections_of(cls: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a section, and those in it, with their keys."""
    from tlt.spec.section import section_of

    yield key, cls
    for name, hint in get_type_hints(cls).items():
        if (inner := section_of(hint)) is not None:
            yield from sections_of(inner, f"{key}.{name}" if key else name)


def type_of(kind: Any) -> str:
    """Name a type as a reader of YAML knows it."""
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    text = re.sub(r"typing\.Literal\[([^\]]*)\]", lambda m: m[1].replace(", ", " or "), text)
    text = re.sub(r"tlt\.base\.strategies\.(\w+)", lambda m: m[1].lower(), text)
    text = re.sub(r"\blist\[(\w+)\]|\btuple\[(\w+), \.\.\.\]", r"list of \1\2", text)
    text = re.sub(r"typing\.Union\[([^\]]*)\]", lambda m: m[1].replace(", ", " or "), text)
    text = re.sub(r" (\||or) msgspec\.\w*UnsetType", "", text)
    text = text.replace(" | None", " or null").replace(" | ", " or ").replace("'", "")
    text = re.sub(r"\btuple\[float, float\]", "two of float", text)
    text = re.sub(r"\bdict\[str, typing\.Any\]", "mapping", text)
    words = {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}
    return re.sub(r"\b(str|int|float|bool)\b", lambda m: words[m[1]], text)


def default_of(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "**required**"
    value = field.default
    if value is msgspec.UNSET:
        return "absent"
    if value is msgspec.NODEFAULT:
        value = field.default_factory() if callable(field.default_factory) else None
    return f"`{msgspec.json.encode(value).decode()}`" if value is not None else "null"


def field_comments(source: str) -> dict[tuple[str, str], str]:
    """Collect the comments that stand above the fields of the classes."""
    found: dict[tuple[str, str], str] = {}
    cls, lines = "", list[str]()
    for line in source.splitlines():
        if opened := re.match(r"class (\w+)", line):
            cls = opened[1]
        if comment := re.match(r"    # (.*)", line):
            lines.append(comment[1])
            continue
        if field := re.match(r"    (\w+): ", line):
            found[cls, field[1]] = " ".join(lines)
        lines = []
    return found


def bounds_of(cls: ast.ClassDef) -> tuple[dict[str, str], list[str]]:
    """Read a section's bounds from the complaints of its checks, and the rules between keys."""
    keys = {node.target.id for node in cls.body if isinstance(node, ast.AnnAssign)}  # pyright: ignore
    bounds: dict[str, str] = {}
    rules: list[str] = []
    for node in ast.walk(cls):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "require"):
            continue
        complaint = node.args[1]
        if not (isinstance(complaint, ast.Constant) and isinstance(complaint.value, str)):
            continue
        key, _, rest = complaint.value.partition(" ")
        if key in keys and rest.startswith(("must ", "may ")):
            words = rest.removeprefix("must ").removeprefix("lie ").removeprefix("be ")
            bounds[key] = words.removeprefix("may ").partition(":")[0].replace("not be", "not")
        else:
            rules.append(complaint.value)
    return bounds, rules


PAGES: dict[str, Callable[[], str]] = {
    "benchmarks": benchmarks_page,
    "cli": cli_page,
    "spec": spec_page,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", choices=[*PAGES, []], help="all, if none is named")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if outdated")
    arguments = parser.parse_args()
    outdated: list[str] = []
    for name in arguments.pages or PAGES:
        file, text = DOCS / f"{name}.md", PAGES[name]()
        written = file.read_text() if file.is_file() else ""
        if written == text:
            continue
        if arguments.check and written.replace(OLD, "") == text.replace(OLD, ""):
            continue
        if arguments.check:
            outdated.append(f"docs/{name}.md is out of date: run `make docs`")
        else:
            file.write_text(text)
    print("\n".join(outdated), end="\n" if outdated else "")
    return 1 if outdated else 0


if __name__ == "__main__":
    sys.exit(main())
