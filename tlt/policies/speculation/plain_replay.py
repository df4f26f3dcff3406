"""Replay a rollout batch without speculation: known answers from one queue, in known slots.

How many rows decode together depends on the lengths, and not on how well each answer could be
guessed. With speculation an answer that is easy to guess ends early and leaves its neighbours
alone, so the batch sizes that speculation met would not be those of plain decoding.
"""

import heapq
from collections.abc import Callable, Sequence

import msgspec

from tlt.policies.speculation.plain_step_costs import StepsByKnot, add_steps, knots_of


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Plain decode steps of all ranks together, and of the rank that ends last."""

    steps: StepsByKnot
    last: StepsByKnot


def replay(
    lengths: Sequence[int], ranks: int, slots: int, seconds_of: Callable[[float], float]
) -> Replay:
    """Decode answers of these lengths in the order of the queue, with `slots` in each rank.

    At first each rank takes no more than its share.
    """
    waiting = [length for length in reversed(lengths) if length > 0]
    share = -(-len(waiting) // ranks)
    engines = [_Rank(seconds_of) for _ in range(ranks)]
    for engine in engines:
        engine.fill(waiting, min(slots, share))
    # the times at which ranks have a free slot again
    due = [(engine.now, index) for index, engine in enumerate(engines)]
    heapq.heapify(due)
    while due:
        _, index = heapq.heappop(due)
        engines[index].fill(waiting, slots)
        if engines[index].advance():
            heapq.heappush(due, (engines[index].now, index))
    last = max(engines, key=lambda engine: engine.now)
    steps: StepsByKnot = {}
    for engine in engines:
        steps = add_steps(steps, engine.steps)
    return Replay(steps=steps, last=last.steps)


class _Rank:
    def __init__(self, seconds_of: Callable[[float], float]) -> None:
        self._seconds_of = seconds_of
        self.now = 0.0
        self.steps: dict[int, float] = {}
        self._decoded = 0
        # decode steps after which answers end
        self._ends: list[int] = []

    def fill(self, waiting: list[int], slots: int) -> None:
        while waiting and len(self._ends) < slots:
            heapq.heappush(self._ends, self._decoded + waiting.pop())

    def advance(self) -> bool:
        """Decode until an answer ends; return False if there is none."""
        if not self._ends:
            return False
        rows, count = len(self._ends), self._ends[0] - self._decoded
        self.now += count * self._seconds_of(rows)
        self._decoded = self._ends[0]
        self.steps = add_steps(
            self.steps, {knot: count * share for knot, share in knots_of(rows).items()}
        )
        while self._ends and self._ends[0] == self._decoded:
            heapq.heappop(self._ends)
        return True
