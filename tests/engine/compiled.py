"""Build a C kernel for each instruction set that this processor has."""

import os
from collections.abc import Callable
from typing import TypeVar

import pytest

# flags that take away what wider vectors need
INSTRUCTION_SETS = ["", "-mno-avx512f", "-mno-avx512f -mno-avx2 -mno-avx"]

_Kernel = TypeVar("_Kernel")


def built(
    find: Callable[[], _Kernel | None], build: Callable[[], _Kernel | None], flags: str
) -> _Kernel:
    """Return what `build` makes with these flags; skip where `find` finds no compiler."""
    if find() is None:
        pytest.skip("no C compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", f"cc {flags}")
        found = build()
    if found is None and os.uname().machine != "x86_64":
        pytest.skip("flags of another processor")
    assert found is not None
    return found
