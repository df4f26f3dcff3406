"""Replay a rollout batch without speculation: known answers from one queue, in known slots.

How many rows decode together depends on the lengths, and not on how well each answer could be
guessed. With speculation an answer that is easy to guess ends early and leaves its neighbours
alone, so the batch sizes that speculation met would not be those of plain decoding.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec

from tlt.policies.speculation.plain_step_costs import StepsByKnot, add_steps, knots_of


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Plain decode steps of all ranks together, and of the rank that ends last."""

    steps: StepsByKnot
    last: StepsByKnot


class ExtraGroups(msgspec.Struct, frozen=True, kw_only=True):
    """Groups at the end of the queue that were issued while the batch was decoded.

    Each waits until one of the groups that may be replaced has ended.
    """

    # answers of a group
    size: int
    count: int
    # numbers of the groups that may be replaced
    replaceable: frozenset[int]


def replay(
    lengths: Sequence[int],
    ranks: int,
    slots: int,
    seconds_of: Callable[[float], float],
    extra: ExtraGroups | None = None,
) -> Replay:
    """Decode answers of these lengths in the order of the queue, with `slots` in each rank.

    At first each rank takes no more than its share.
    """
    queue = _Queue(lengths, extra)
    share = -(-len(queue.waiting) // ranks)
    engines = [_Rank(seconds_of) for _ in range(ranks)]
    for engine in engines:
        engine.fill(queue, min(slots, share), 0.0)
    # the times at which ranks have a free slot again
    due = [(engine.now, index) for index, engine in enumerate(engines)]
    heapq.heapify(due)
    idle: list[int] = []
    while due:
        now, index = heapq.heappop(due)
        if queue.finish(engines[index].ended):
            due += [(now, each) for each in idle]
            heapq.heapify(due)
            idle.clear()
        engines[index].fill(queue, slots, now)
        if engines[index].advance():
            heapq.heappush(due, (engines[index].now, index))
        else:
            idle.append(index)
    last = max(engines, key=lambda engine: engine.now)
    steps: StepsByKnot = {}
    for engine in engines:
        steps = add_steps(steps, engine.steps)
    return Replay(steps=steps, last=last.steps)


class _Queue:
    def __init__(self, lengths: Sequence[int], extra: ExtraGroups | None) -> None:
        extra = extra or ExtraGroups(size=max(1, len(lengths)), count=0, replaceable=frozenset())
        answers = [(length, i // extra.size) for i, length in enumerate(lengths) if length > 0]
        self._left = Counter(group for _, group in answers)
        self._replaceable = extra.replaceable
        first = len(lengths) // extra.size - extra.count
        self.waiting = deque(answer for answer in answers if answer[1] < first or not extra.count)
        self._held = deque(
            [answer for answer in answers if answer[1] == group]
            for group in range(first, first + extra.count)
        )

    def finish(self, groups: Sequence[int]) -> bool:
        """End an answer of each of these groups; return True if extra groups join the queue."""
        released = False
        for group in groups:
            self._left[group] -= 1
            if self._left[group] == 0 and group in self._replaceable and self._held:
                self.waiting += self._held.popleft()
                released = True
        return released


class _Rank:
    def __init__(self, seconds_of: Callable[[float], float]) -> None:
        self._seconds_of = seconds_of
        self.now = 0.0
        self.steps: dict[int, float] = {}
        # the groups of the answers that ended last
        self.ended: list[int] = []
        self._decoded = 0
        # decode steps after which answers end, with their groups
        self._ends: list[tuple[int, int]] = []

    def fill(self, queue: _Queue, slots: int, now: float) -> None:
        while queue.waiting and len(self._ends) < slots:
            length, group = queue.waiting.popleft()
            heapq.heappush(self._ends, (self._decoded + length, group))
            self.now = max(self.now, now)

    def advance(self) -> bool:
        """Decode until an answer ends; return False if there is none."""
        self.ended = []
        if not self._ends:
            return False
        rows, count = len(self._ends), self._ends[0][0] - self._decoded
        self.now += count * self._seconds_of(rows)
        self._decoded = self._ends[0][0]
        self.steps = add_steps(
            self.steps, {knot: count * share for knot, share in knots_of(rows).items()}
        )
        while self._ends and self._ends[0][0] == self._decoded:
            self.ended.append(heapq.heappop(self._ends)[1])
        return True
