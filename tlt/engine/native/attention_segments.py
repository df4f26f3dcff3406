"""Rows that attend together by torch do so over as many positions as the longest of them has.

One long answer among short ones would make all of them pay for its length; so the batch is cut
where calls and padding together cost least.
"""

from collections.abc import Sequence
from typing import NamedTuple

# What one more call costs, in positions of one row. Measured with heads of 32 on a CPU (5 us
# against 0.0125 us); wider heads and other devices merit their own figure.
_CALL = 400


class Segment(NamedTuple):
    first: int
    # excluded
    last: int
    # positions to attend to
    width: int
    # whether every row has as many
    level: bool


def cheapest_segments(lengths: Sequence[int]) -> list[Segment]:
    costs = [0]
    starts = [0]
    for last in range(1, len(lengths) + 1):
        width, cheapest, start = 0, -1, 0
        for first in range(last - 1, -1, -1):
            width = max(width, lengths[first])
            cost = costs[first] + _CALL + (last - first) * width
            if cheapest < 0 or cost < cheapest:
                cheapest, start = cost, first
        costs.append(cheapest)
        starts.append(start)
    segments: list[Segment] = []
    last = len(lengths)
    while last:
        first = starts[last]
        part = lengths[first:last]
        segments.append(Segment(first, last, max(part), min(part) == max(part)))
        last = first
    return segments[::-1]
