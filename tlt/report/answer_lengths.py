"""The answers of one round: how long they were, when they came, which slots they used."""

from collections import defaultdict
from collections.abc import Sequence

from tlt.ids import WorkerId
from tlt.policies.job.run_state import RunState
from tlt.protocol.events import AnyEvent, RolloutDropped, RolloutFinished, RolloutScored
from tlt.report.run_summary import Rollout, Spread
from tlt.report.statistics import quantile


class Answers:
    def __init__(self, began: float) -> None:
        self.began = began
        self.lengths: list[int] = []
        self.clipped = 0
        self.dropped = 0
        self.unscored = 0
        # whose answer came last
        self.last: WorkerId | None = None
        # in seconds after it began
        self.done: list[float] = []
        self._used: defaultdict[WorkerId, float] = defaultdict(float)
        # slot-seconds that passed, and how many had when the last answer came; how long after the
        # last time that passed that was
        self._passed: defaultdict[WorkerId, float] = defaultdict(float)
        self._there: dict[WorkerId, float] = {}
        self._late: float | None = None

    def pass_time(self, state: RunState, passed: float) -> None:
        slots = state.spec.rollout.slots
        if self._late is not None:
            self._there = dict(self._passed)
        for worker, known in state.workers.items():
            before = self._passed[worker]
            if self._late is not None:
                self._there[worker] = before + self._late * slots * known.info.ranks
            self._passed[worker] = before + passed * slots * known.info.ranks
        self._late = None

    def add(self, event: AnyEvent, at: float, pending: float) -> None:
        """`pending`: seconds up to now that have not passed here."""
        match event:
            case RolloutFinished():
                self.lengths.append(event.length)
                self.clipped += event.stop == "length"
                self.last = event.worker
                self.done.append(at - self.began)
                self._used[event.worker] += event.decode_seconds
                self._late = pending
            case RolloutDropped():
                self.dropped += 1
            case RolloutScored():
                self.unscored += event.error is not None
            case _:
                pass

    def rollout(self, trained: int) -> Rollout:
        """Once all time up to now has passed."""
        there = self._there if self._late is None else dict(self._passed)
        return Rollout(
            done_50=quantile(self.done, 0.5),
            done_90=quantile(self.done, 0.9),
            done_99=quantile(self.done, 0.99),
            slots=there,
            empty={worker: max(0.0, slots - self._used[worker]) for worker, slots in there.items()},
            trained=trained / max(1, sum(self.lengths)),
        )


def spread(lengths: Sequence[int]) -> Spread:
    if not lengths:
        return Spread()
    ordered = sorted(lengths)
    return Spread(
        mean=sum(ordered) / len(ordered),
        p50=ordered[len(ordered) // 2],
        p90=ordered[int(0.9 * (len(ordered) - 1))],
        max=ordered[-1],
    )
