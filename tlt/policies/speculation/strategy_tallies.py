"""What each way of decoding came to, until somebody asks.

A control run is told as a whole, once it is over: what its rounds have in common would otherwise
pass for agreement between runs. Where the batch passes from one bucket to another, so does the run.
"""

from dataclasses import dataclass, field

from tlt.ids import DrafterVersion
from tlt.policies.speculation.strategy_policy import Choice, bucket_of
from tlt.protocol.records import ControlRuns, StrategyTally
from tlt.strategies import Strategy

# strategy, bucket, drafter, whether it is control
_Key = tuple[Strategy, int, DrafterVersion | None, bool]


@dataclass
class _Sums:
    rounds: int = 0
    tried: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    expected: float = 0.0

    def add(self, other: "_Sums") -> None:
        self.rounds += other.rounds
        self.tried += other.tried
        self.rows += other.rows
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.expected += other.expected


@dataclass
class _Runs:
    count: int = 0
    tokens_squared: float = 0.0
    seconds_squared: float = 0.0
    product: float = 0.0

    def add(self, run: _Sums) -> None:
        self.count += 1
        self.tokens_squared += run.tokens**2
        self.seconds_squared += run.seconds**2
        self.product += run.tokens * run.seconds

    def told(self) -> ControlRuns:
        return ControlRuns(
            count=self.count,
            tokens_squared=self.tokens_squared,
            seconds_squared=self.seconds_squared,
            product=self.product,
        )


@dataclass
class _Entry:
    sums: _Sums = field(default_factory=_Sums)
    runs: _Runs = field(default_factory=_Runs)


class TallyCollector:
    def __init__(self) -> None:
        self._entries: dict[_Key, _Entry] = {}
        # the control run in hand
        self._run: tuple[_Key, _Sums] | None = None

    def add(
        self,
        choice: Choice,
        drafter: DrafterVersion | None,
        rows: int,
        tokens: int,
        seconds: float,
        work: float,
    ) -> None:
        """`work`: seconds by the clock that predictions go by."""
        control = choice.why == "control"
        key = choice.strategy, bucket_of(rows), drafter, control
        tried = choice.why == "explore"
        round = _Sums(1, tried, rows, tokens, seconds, choice.predicted * work)
        if self._run is not None and self._run[0] != key:
            self._end_run()
        if not control:
            self._entry(key).sums.add(round)
        elif self._run is None:
            self._run = key, round
        else:
            self._run[1].add(round)

    def taken(self, over: bool) -> tuple[StrategyTally, ...]:
        """From now on they are counted anew. `over`: nothing runs any more."""
        if over:
            self._end_run()
        entries, self._entries = self._entries, {}
        return tuple(
            StrategyTally(
                strategy=strategy,
                bucket=bucket,
                drafter=drafter,
                control=entry.runs.told() if control else None,
                steps=entry.sums.rounds,
                explored=entry.sums.tried,
                rows=entry.sums.rows,
                tokens=entry.sums.tokens,
                seconds=entry.sums.seconds,
                expected=entry.sums.expected,
            )
            for (strategy, bucket, drafter, control), entry in entries.items()
        )

    def _end_run(self) -> None:
        if self._run is None:
            return
        key, run = self._run
        self._run = None
        entry = self._entry(key)
        entry.sums.add(run)
        entry.runs.add(run)

    def _entry(self, key: _Key) -> _Entry:
        return self._entries.setdefault(key, _Entry())
