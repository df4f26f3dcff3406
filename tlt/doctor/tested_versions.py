"""Compare installed packages with the versions that TLT was tested with.

Bounds are those of pyproject.toml; `tested` are the versions of requirements/cpu.lock.
"""

import importlib.metadata
import re
import sys
from typing import NamedTuple

from tlt.doctor.findings import Finding

Version = tuple[int, ...]


class SupportedRange(NamedTuple):
    package: str
    # the first version that is supported, and the first that isn't any more
    least: Version
    below: Version | None
    tested: str
    # TLT doesn't start without it
    needed: bool = True
    without: str = ""


RANGES = (
    SupportedRange("torch", (2, 11), None, "2.13.0"),
    SupportedRange("transformers", (5, 17), (6,), "5.19.0"),
    SupportedRange("ray", (2, 60), (3,), "2.60.0"),
    SupportedRange("redis", (8, 1), (9,), "8.1.0"),
    SupportedRange(
        "sglang", (0, 5, 23), (0, 5, 24), "0.5.23", False, "only rollout.engine: native can be used"
    ),
    SupportedRange("flash-attn", (2, 8), None, "none yet", False),
)
PYTHON = SupportedRange("Python", (3, 11), (3, 13), "3.11")


def check_python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if PYTHON.least <= sys.version_info[:2] < (PYTHON.below or (4,)):
        return Finding(
            subject="Python", found=f"{version} ({_range(PYTHON)}, tested {PYTHON.tested})"
        )
    advice = "make the environment with Python 3.11 or 3.12"
    return Finding(subject="Python", found=version, status="missing", advice=advice)


def check_packages() -> list[Finding]:
    return [check_package(each, installed_version(each.package)) for each in RANGES]


def check_package(tested: SupportedRange, version: str | None) -> Finding:
    what = tested.package
    if version is None:
        if tested.needed:
            return Finding(
                subject=what, found="not installed", status="missing", advice=_install(tested)
            )
        if not tested.without:
            return Finding(subject=what, found="not installed, and not needed")
        return Finding(
            subject=what,
            found="not installed",
            status="warning",
            advice=f"{tested.without}; {_install(tested)}",
        )
    number = parse_version(version)
    if number < tested.least or (tested.below is not None and number >= tested.below):
        return Finding(
            subject=what,
            found=version,
            status="missing" if tested.needed else "warning",
            advice=f"{tested.tested} is tested; {_install(tested)}",
        )
    return Finding(subject=what, found=f"{version} ({_range(tested)}, tested {tested.tested})")


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse_version(text: str) -> Version:
    """Return the release numbers: (2, 13, 0) of `2.13.0+cpu`."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def _range(tested: SupportedRange) -> str:
    least = ".".join(map(str, tested.least))
    return f">={least}" + (f",<{'.'.join(map(str, tested.below))}" if tested.below else "")


def _install(tested: SupportedRange) -> str:
    return f"pip install '{tested.package}{_range(tested)}'"
