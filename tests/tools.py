"""Skip a test whose programs this machine lacks."""

import os
import shutil
from typing import NoReturn

import pytest


def require_tools(*programs: str) -> None:
    """Skip the test without these programs, or fail it where TLT_REQUIRE_TOOLS is set."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        skip_or_fail(f"{' and '.join(missing)} not found on PATH")


def skip_or_fail(complaint: str) -> NoReturn:
    if "TLT_REQUIRE_TOOLS" in os.environ:
        pytest.fail(complaint)
    pytest.skip(complaint)
