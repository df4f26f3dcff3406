"""Strategies that were used lately, with their predicted and measured speed."""

from collections import Counter

import msgspec

from tlt.base.human_format import name_strategy
from tlt.base.id_types import DrafterVersion
from tlt.protocol.events import DecodingReported

_PERIOD_SECONDS = 5.0
_PERIODS = 6

# bucket, strategy, drafter, and True for control runs
_Key = tuple[int, str, DrafterVersion | None, bool]
_Sums = dict[_Key, Counter[str]]


class StrategyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy at batch sizes of one bucket."""

    # the largest batch size of the bucket
    bucket: int
    name: str
    drafter: DrafterVersion | None
    # True for steps of control runs, which decode without speculation
    control: bool
    steps: int
    explored: int
    rows: int
    tokens: int
    seconds: float
    # tokens a second of one rank
    predicted: float
    measured: float

    def describe_speed(self) -> str:
        return f"{self.predicted:.0f} tokens/s predicted, {self.measured:.0f} measured"


class StrategyUsage:
    """Keep the strategies of the last half minute of decoding."""

    def __init__(self) -> None:
        self._periods: dict[int, _Sums] = {}
        # the bucket in which the last report had the most steps
        self._last_bucket: int | None = None

    def add(self, event: DecodingReported, at: float) -> None:
        number = int(at // _PERIOD_SECONDS)
        period = self._periods.setdefault(number, {})
        for tally in event.tallies:
            control = tally.control is not None
            key = tally.bucket, name_strategy(tally.strategy), tally.drafter, control
            sums = period.setdefault(key, Counter())
            for name in ("steps", "explored", "rows", "tokens", "seconds", "expected"):
                sums[name] += getattr(tally, name)
        for old in [n for n in self._periods if n <= number - _PERIODS]:
            del self._periods[old]
        if event.tallies:
            self._last_bucket = max(event.tallies, key=lambda tally: tally.steps).bucket

    def table(self) -> tuple[StrategyRow, ...]:
        sums: _Sums = {}
        for period in self._periods.values():
            for key, part in period.items():
                sums.setdefault(key, Counter()).update(part)
        rows = [
            StrategyRow(
                bucket=bucket,
                name=name,
                drafter=drafter,
                control=control,
                steps=each["steps"],
                explored=each["explored"],
                rows=each["rows"],
                tokens=each["tokens"],
                seconds=float(each["seconds"]),
                predicted=each["expected"] / each["seconds"] if each["seconds"] else 0.0,
                measured=each["tokens"] / each["seconds"] if each["seconds"] else 0.0,
            )
            for (bucket, name, drafter, control), each in sums.items()
        ]
        return tuple(sorted(rows, key=lambda row: (row.bucket, -row.steps, row.name)))

    def why(self) -> str:
        """Explain the last choice in up to three sentences."""
        table = [row for row in self.table() if row.bucket == self._last_bucket]
        chosen = [row for row in table if not row.control]
        if not chosen:
            return ""
        best = max(chosen, key=lambda row: row.steps - row.explored)
        rows = "1 row" if best.bucket == 1 else f"up to {best.bucket} rows"
        text = f"For {rows} most decode steps used {best.name} lately, "
        text += f"each rank with {best.describe_speed()}."
        others = sorted((row for row in chosen if row is not best), key=lambda row: -row.predicted)
        for other in others[:1]:
            text += f" {other.name[0].upper()}{other.name[1:]}: {other.describe_speed()}."
        controls = [row for row in table if row.control]
        if controls and controls[0].seconds:
            text += f" Without speculation, in control runs: {controls[0].measured:.0f} measured."
        return text
