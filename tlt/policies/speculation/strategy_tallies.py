"""Add up what each strategy decoded, until the sums are taken.

A control run is reported as a whole once it has ended, because its steps are correlated and may not
count as independent runs. It counts for the bucket of batch sizes in which it began.
"""

from dataclasses import dataclass, field

from tlt.base.id_types import DrafterVersion
from tlt.base.strategies import Strategy
from tlt.policies.speculation.strategy_policy import Choice, bucket_of
from tlt.protocol.shared_values import ControlRuns, StrategyTally

_NO_RUNS = ControlRuns(count=0, steps_squared=0.0, seconds_squared=0.0, product=0.0)
# strategy, bucket, drafter, true for control runs
_Key = tuple[Strategy, int, DrafterVersion | None, bool]


@dataclass
class _Sums:
    steps: int = 0
    explored: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    work: float = 0.0
    overhead: float = 0.0
    expected: float = 0.0

    def add(self, other: "_Sums") -> None:
        self.steps += other.steps
        self.explored += other.explored
        self.rows += other.rows
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.work += other.work
        self.overhead += other.overhead
        self.expected += other.expected


@dataclass
class _Entry:
    sums: _Sums = field(default_factory=_Sums)
    runs: ControlRuns | None = None

    def add_run(self, run: _Sums) -> None:
        self.sums.add(run)
        before, seconds = self.runs or _NO_RUNS, run.work - run.overhead
        self.runs = ControlRuns(
            count=before.count + 1,
            steps_squared=before.steps_squared + run.steps**2,
            seconds_squared=before.seconds_squared + seconds**2,
            product=before.product + run.steps * seconds,
        )


class TallyCollector:
    def __init__(self) -> None:
        self._entries: dict[_Key, _Entry] = {}
        # the control run in progress
        self._run: tuple[_Key, _Sums] | None = None
        # what the last step was counted for, and where
        self._last: tuple[Choice, int, DrafterVersion | None] | None = None
        self._sums = _Sums()

    def add(
        self,
        choice: Choice,
        drafter: DrafterVersion | None,
        rows: int,
        tokens: int,
        seconds: float,
        work: float,
        overhead: float,
    ) -> None:
        """Add one decode step, with the overhead in its work."""
        last = self._last
        # most steps are of the same choice, and a step of a small policy takes less than 1 ms
        if last is None or last[0] is not choice or last[1] != rows or last[2] != drafter:
            self._last = choice, rows, drafter
            self._sums = self._sums_of(choice, rows, drafter)
        sums = self._sums
        sums.steps += 1
        sums.explored += choice.why == "explore"
        sums.rows += rows
        sums.tokens += tokens
        sums.seconds += seconds
        sums.work += work
        sums.overhead += overhead
        sums.expected += choice.predicted * (work - overhead)

    def take(self, idle: bool) -> tuple[StrategyTally, ...]:
        """Return the sums and begin anew; an `idle` engine's control run has ended."""
        self._last = None
        if idle:
            self._end_run()
        entries, self._entries = self._entries, {}
        return tuple(
            StrategyTally(
                strategy=strategy,
                bucket=bucket,
                drafter=drafter,
                control=entry.runs,
                **vars(entry.sums),
            )
            for (strategy, bucket, drafter, _), entry in entries.items()
        )

    def _sums_of(self, choice: Choice, rows: int, drafter: DrafterVersion | None) -> _Sums:
        key = choice.strategy, bucket_of(rows), drafter, choice.why == "control"
        if choice.why != "control":
            self._end_run()
            return self._entry(key).sums
        if self._run is None:
            self._run = key, _Sums()
        return self._run[1]

    def _end_run(self) -> None:
        if self._run is not None:
            key, run = self._run
            self._run = None
            self._entry(key).add_run(run)

    def _entry(self, key: _Key) -> _Entry:
        if key not in self._entries:
            self._entries[key] = _Entry()
        return self._entries[key]
