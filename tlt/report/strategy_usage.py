"""Which ways of decoding were used for how many rows, and what was foretold and seen of each."""

import msgspec

from tlt.human_format import way
from tlt.ids import DrafterVersion
from tlt.protocol.events import DecodingReported
from tlt.protocol.records import StrategyTally

_PERIOD_SECONDS = 5.0
_PERIODS = 6

_Key = tuple[int, str, DrafterVersion | None, bool]


class Way(msgspec.Struct, frozen=True, kw_only=True):
    # the largest batch size in it
    bucket: int
    name: str
    drafter: DrafterVersion | None
    # nothing was guessed so that others can be compared with it
    control: bool
    rounds: int
    tried: int
    rows: int
    tokens: int
    seconds: float
    # tokens a second of a rank that decodes so
    predicted: float
    seen: float


class _Sums:
    def __init__(self) -> None:
        self.rounds = self.tried = self.rows = self.tokens = 0
        self.seconds = self.expected = 0.0

    def add(self, tally: StrategyTally) -> None:
        self.rounds += tally.steps
        self.tried += tally.explored
        self.rows += tally.rows
        self.tokens += tally.tokens
        self.seconds += tally.seconds
        self.expected += tally.expected

    def merge(self, other: "_Sums") -> None:
        self.rounds += other.rounds
        self.tried += other.tried
        self.rows += other.rows
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.expected += other.expected


class Ways:
    """Of the last half minute that somebody decoded."""

    def __init__(self) -> None:
        self._periods: dict[int, dict[_Key, _Sums]] = {}
        # the batch sizes of the last choice
        self._last: int | None = None

    def add(self, event: DecodingReported, at: float) -> None:
        number = int(at // _PERIOD_SECONDS)
        period = self._periods.setdefault(number, {})
        for tally in event.tallies:
            key = tally.bucket, way(tally.strategy), tally.drafter, tally.control is not None
            period.setdefault(key, _Sums()).add(tally)
        for old in [n for n in self._periods if n <= number - _PERIODS]:
            del self._periods[old]
        if event.tallies:
            self._last = max(event.tallies, key=lambda tally: tally.steps).bucket

    def table(self) -> tuple[Way, ...]:
        sums: dict[_Key, _Sums] = {}
        for period in self._periods.values():
            for key, some in period.items():
                sums.setdefault(key, _Sums()).merge(some)
        found = [
            Way(
                bucket=bucket,
                name=name,
                drafter=drafter,
                control=control,
                rounds=some.rounds,
                tried=some.tried,
                rows=some.rows,
                tokens=some.tokens,
                seconds=some.seconds,
                predicted=some.expected / some.seconds if some.seconds else 0.0,
                seen=some.tokens / some.seconds if some.seconds else 0.0,
            )
            for (bucket, name, drafter, control), some in sums.items()
        ]
        return tuple(sorted(found, key=lambda w: (w.bucket, -w.rounds, w.name)))

    def why(self) -> str:
        """What the last choice was made from, in a sentence or three."""
        table = [w for w in self.table() if w.bucket == self._last]
        guided = [w for w in table if not w.control]
        if not guided:
            return ""
        best = max(guided, key=lambda w: w.rounds - w.tried)
        rows = "1 row" if best.bucket == 1 else f"up to {best.bucket} rows"
        said = f"For {rows} most rounds decoded with {best.name} lately, "
        said += f"each rank with {_rates(best)}."
        others = sorted((w for w in guided if w is not best), key=lambda w: -w.predicted)
        for other in others[:1]:
            said += f" {other.name[0].upper()}{other.name[1:]}: {_rates(other)}."
        plain = [w for w in table if w.control]
        if plain and plain[0].seconds:
            said += f" Without guessing, in control runs: {plain[0].seen:.0f} seen."
        return said


def _rates(used: Way) -> str:
    return f"{used.predicted:.0f} tokens/s predicted, {used.seen:.0f} seen"
