"""Looks that end the work which calls them."""

import itertools
from collections.abc import Callable, Iterator

from tlt.interrupt import Interrupted


def interrupting_checks(stride: int) -> Iterator[Callable[[], None]]:
    """At the first look, at a later one, ..."""
    for count in itertools.count(0, stride):
        left = iter(range(count))

        def look(left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise Interrupted

        yield look
