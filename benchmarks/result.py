"""A benchmark's result: claims, measured values, machine and commit."""

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from rich.console import Console
from rich.table import Table


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A claim that the value is at least the bar, or at most if less is better."""

    name: str
    value: float
    unit: str
    bar: float
    less_is_better: bool = False

    @property
    def holds(self) -> bool:
        return self.value <= self.bar if self.less_is_better else self.value >= self.bar


def at_most(name: str, value: float, unit: str, bar: float) -> Claim:
    return Claim(name=name, value=round(value, 3), unit=unit, bar=bar, less_is_better=True)


def write_result(
    name: str, claims: list[Claim], details: dict[str, Any], seconds: float, out: Path | None
) -> NoReturn:
    save_result(name, claims, details, seconds, out)
    table = Table("claim", "value", "bar", "holds", title=name, title_justify="left", box=None)
    for claim in claims:
        sign = "≤" if claim.less_is_better else "≥"
        value = f"{claim.value:.4g} {claim.unit}"
        table.add_row(claim.name, value, f"{sign} {claim.bar:g}", "yes" if claim.holds else "NO")
    Console().print(table)
    sys.exit(0 if all(claim.holds for claim in claims) else 1)


def save_result(
    name: str, claims: list[Claim], details: dict[str, Any], seconds: float, out: Path | None
) -> None:
    """Write the file alone, as a benchmark does that saves what it has so far."""
    result = {
        "name": name,
        "commit": describe_commit(),
        "host": describe_host(),
        "seconds": round(seconds, 1),
        "claims": [{**msgspec.to_builtins(claim), "holds": claim.holds} for claim in claims],
        "details": details,
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")


def describe_commit() -> str:
    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "HEAD") or "unknown") + ("+changes" if changed else "")


def describe_host() -> dict[str, str | int | None]:
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": _gpu(),
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpu() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
