"""Checks that interrupt the work which calls them."""

import itertools
from collections.abc import Callable, Iterator

from tlt.base.interrupt_check import Interrupted


def interrupting_checks(stride: int) -> Iterator[Callable[[], None]]:
    """Yield checks that raise at their first call, then after `stride` calls, and so on."""
    for count in itertools.count(0, stride):
        left = iter(range(count))

        def check(left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise Interrupted

        yield check
