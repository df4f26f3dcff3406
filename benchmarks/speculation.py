"""What speculation gains at each batch size. That it changes no token: `benchmarks.lossless`.

`python -m benchmarks.speculation --out F.json [--minutes N]`

The tiny reasoner answers held-out prompts in groups of 16, at temperature 1, one thread, float32,
log-probs and the states of four layers kept whichever way it decodes. A batch stays full. Each way
of decoding (`off`, `adaptive`, the three fixed ones that looked best) has an engine of its own, and
all are given the same requests: as no way changes a token, they write the same answers, and what
differs is the time. They take turns in random order; seconds are CPU seconds. First `adaptive` and
the three go on until each has written as much as the others: the best one of every other turn is
what `adaptive` is held against in the turns between them. Then `adaptive` and `off`, whose speed
hardly depends on what it writes, so that it is given a quarter of the tokens. Of these two there
are twins, who write the same: by what they differ it is known how much of a ratio is chance. What
other answers would say is told, too.
"""

import argparse
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import quantiles, variance
from typing import Any, NamedTuple

import torch

from benchmarks.result import Claim, write_result
from benchmarks.speculating import ARMS, Requests, cpu_seconds, decode_by, engine
from tlt.policies.speculation.adaptive_strategy import AdaptivePolicy
from tlt.policies.speculation.strategy_policy import StrategyPolicy
from tlt.strategies import Draft, Ngram, Off, Strategy

_BARS = {1: 2.3, 4: 2.1, 8: 1.7, 16: 1.5, 32: 1.15}
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
# of a turn, for a way that speculates
_TURN_SECONDS = 0.5
# before looking how much that was
_STEPS = 4
# answers of each row before anything is counted: at first all are short
_WARM_UP = 3
# half of the interval of a ratio: 0.03 with room, for the next drawing says a little more or less
_INTERVAL = 0.027
# and as a share of it, if the answers were others
_INTERVAL_OF_OTHERS = 0.03
# of the time, to find the fixed ways that may be the best, how many, and to compare them
_FINDING, _COMPARING = 0.1, 0.2
_CANDIDATES = 3
# of a turn's tokens, for `off`
_PLAIN = 0.25
_LEAST_TURNS, _LOOK_TURNS = 24, 8
_RESAMPLES = 1000
_TWINS = 2
# of a normal distribution, 95 % lie so many standard deviations about its mean
_NORMAL_95 = 1.96


class Window(NamedTuple):
    tokens: int
    seconds: float


# of each twin
_Turn = tuple[Window, ...]
_Seen = dict[str, list[_Turn]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=10, help="at most, for each batch size")
    parser.add_argument("--batches", type=int, nargs="+", default=_BATCHES)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    device = torch.device(arguments.device)
    batches = {
        batch: _Batch(batch, device).measured(60 * arguments.minutes) for batch in arguments.batches
    }
    claims = [
        *(
            Claim(
                name=f"speculation.speedup.batch{batch}",
                value=batches[batch]["adaptive_vs_off"],
                unit="x",
                bar=bar,
            )
            for batch, bar in _BARS.items()
            if batch in batches
        ),
        _worst("speculation.adaptive_vs_plain_min", "adaptive_vs_off", batches, 0.97),
        _worst("speculation.adaptive_vs_best_min", "adaptive_vs_best_fixed", batches, 0.95),
    ]
    write_result(
        "speculation", claims, {"batches": batches}, time.monotonic() - began, arguments.out
    )


def _worst(name: str, key: str, batches: dict[int, dict[str, Any]], bar: float) -> Claim:
    return Claim(name=name, value=min(b[key] for b in batches.values()), unit="x", bar=bar)


class _Lane:
    """An engine that decodes in one way, or in one after the other."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self._batch = batch
        self._device = device
        self._engine = engine(batch, device=device)
        self._requests = Requests()
        self.tokens = 0

    def warm_up(self) -> None:
        decode_by(self._engine, Draft(depth=6))
        ended = 0
        while ended < _WARM_UP * self._batch:
            ended += self._step()
        self._look()

    def decode_by(self, way: Strategy | StrategyPolicy, seed: int) -> None:
        decode_by(self._engine, way, seed)

    def decode_to(self, tokens: int) -> Window:
        """Until it has written so many in all."""
        return self._decode(lambda: self.tokens >= tokens)

    def decode_for(self, seconds: float) -> Window:
        end = cpu_seconds(self._device) + seconds
        return self._decode(lambda: cpu_seconds(self._device) >= end)

    def _decode(self, done: Callable[[], bool]) -> Window:
        began, before = cpu_seconds(self._device), self.tokens
        while not done():
            for _ in range(_STEPS):
                self._step()
            self._look()
        return Window(self.tokens - before, cpu_seconds(self._device) - began)

    def _look(self) -> None:
        self.tokens += sum(tally.tokens for tally in self._engine.take_strategy_tallies())

    def _step(self) -> int:
        """Returns how many answers ended."""
        # one in waiting for each that runs: the batch is never short of one
        missing = 2 * self._batch - self._engine.running
        if missing > 0:
            self._engine.submit(self._requests.take(missing))
        return len(self._engine.step())


class _Batch:
    """What each way of decoding did in its turns, at one batch size."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self._batch = batch
        self._device = device
        self._dice = random.Random(batch)

    def measured(self, most_seconds: float) -> dict[str, Any]:
        """First it is found out which fixed ways may be the best, then those are compared."""
        found = self._found(_FINDING * most_seconds)
        guessing = [arm for arm in ARMS if arm != Off()]
        candidates = sorted(guessing, key=lambda arm: -found[name_of(arm)])[:_CANDIDATES]
        names = [name_of(way) for way in candidates]
        each = round(_TURN_SECONDS * found[names[0]])
        closely = self._turns(
            {name_of(way): [self._lane(way)] for way in (AdaptivePolicy(), *candidates)},
            dict.fromkeys(("adaptive", *names), each),
            lambda seen: _half(self._others(seen["adaptive"], _best(seen, names))) < _INTERVAL,
            _COMPARING * most_seconds,
        )
        plainly = self._turns(
            {
                name_of(way): [self._lane(way) for _ in range(_TWINS)]
                for way in (AdaptivePolicy(), Off())
            },
            {"adaptive": each, "off": round(_PLAIN * each)},
            self._is_known,
            (1 - _FINDING - _COMPARING) * most_seconds,
        )
        return self._summary(names, found, closely, plainly)

    def _turns(
        self,
        lanes: dict[str, list[_Lane]],
        each: dict[str, int],
        enough: Callable[[_Seen], bool],
        most_seconds: float,
    ) -> _Seen:
        """Until what they are compared for is known well enough, or the time is over."""
        seen: _Seen = {name: [] for name in lanes}
        all_ = [(name, twin) for name, twins in lanes.items() for twin in range(len(twins))]
        # the first turn does not count
        targets = {(n, twin): lanes[n][twin].tokens + each[n] for n, twin in all_}
        for name, twin in all_:
            lanes[name][twin].decode_to(targets[name, twin])
        began, turns = time.monotonic(), 0
        while turns < 2 or time.monotonic() < began + most_seconds:
            windows: dict[tuple[str, int], Window] = {}
            for name, twin in self._dice.sample(all_, len(all_)):
                targets[name, twin] += each[name]
                windows[name, twin] = lanes[name][twin].decode_to(targets[name, twin])
            for name, twins in lanes.items():
                seen[name].append(tuple(windows[name, twin] for twin in range(len(twins))))
            turns += 1
            if turns >= _LEAST_TURNS and turns % _LOOK_TURNS == 0 and enough(seen):
                break
        return seen

    def _is_known(self, seen: _Seen) -> bool:
        adaptive, off = seen["adaptive"], seen["off"]
        others = _half(self._others(adaptive, off)) * _speed(off) / _speed(adaptive)
        return _half(_same(adaptive, off)) < _INTERVAL and others < _INTERVAL_OF_OTHERS

    def _found(self, seconds: float) -> dict[str, float]:
        """Tokens a second of every fixed way."""
        lane, seen = self._lane(Off()), _Seen()
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            for arm in self._dice.sample(ARMS, len(ARMS)):
                lane.decode_by(arm, seed=0)
                lane.decode_for(_TURN_SECONDS / 5)
                seen.setdefault(name_of(arm), []).append((lane.decode_for(_TURN_SECONDS),))
        return {name: _speed(windows) for name, windows in seen.items()}

    def _lane(self, way: Strategy | StrategyPolicy) -> _Lane:
        lane = _Lane(self._batch, self._device)
        lane.warm_up()
        lane.decode_by(way, seed=self._dice.randrange(2**32))
        return lane

    def _others(self, own: Sequence[_Turn], others: Sequence[_Turn]) -> tuple[float, float]:
        """Where 95 % of the ratios of the speeds lie when the turns are drawn again."""
        turns = list(zip(own, others, strict=True))
        ratios: list[float] = []
        for _ in range(_RESAMPLES):
            ones, against = zip(*self._dice.choices(turns, k=len(turns)), strict=True)
            ratios.append(_speed(ones) / _speed(against))
        cuts = quantiles(ratios, n=40)
        return cuts[0], cuts[-1]

    def _summary(
        self, candidates: Sequence[str], found: dict[str, float], closely: _Seen, plainly: _Seen
    ) -> dict[str, Any]:
        best = _best(closely, candidates)
        adaptive, off = plainly["adaptive"], plainly["off"]
        return {
            "adaptive_vs_off": _speed(adaptive) / _speed(off),
            "interval": _same(adaptive, off),
            # the first twin's seconds over the second's
            "twins": {name: _apart(turns) for name, turns in plainly.items()},
            "interval_with_other_answers": self._others(adaptive, off),
            "best_fixed": max(candidates, key=lambda name: _speed(closely[name])),
            "adaptive_vs_best_fixed": _speed(closely["adaptive"]) / _speed(best),
            "interval_best": self._others(closely["adaptive"], best),
            "tokens_per_second": _speeds(plainly),
            "tokens_per_second_beside_candidates": _speeds(closely),
            "when_candidates_were_found": {n: round(speed, 1) for n, speed in found.items()},
            "turns": len(adaptive),
            "turns_beside_candidates": len(best),
        }


def _best(seen: _Seen, names: Sequence[str]) -> list[_Turn]:
    """In each turn, of the way that was the best in every other turn from the next one on."""
    best = [max(names, key=lambda name: _speed(seen[name][1 - half :: 2])) for half in (0, 1)]
    return [seen[best[turn % 2]][turn] for turn in range(len(seen[names[0]]))]


def _same(own: Sequence[_Turn], others: Sequence[_Turn]) -> tuple[float, float]:
    """Where 95 % of the ratios of the speeds would lie if the same answers were written again."""
    ratio = _speed(own) / _speed(others)
    apart = _NORMAL_95 * ratio * math.hypot(_uncertain(own), _uncertain(others))
    return ratio - apart, ratio + apart


def _uncertain(turns: Sequence[_Turn]) -> float:
    """Standard error of the seconds of all, as a share of them: twins differ by chance alone.

    One that wrote more in its turn took longer: that is taken off first.
    """
    pace = 1.0 / _speed(turns)
    missed = [[window.seconds - pace * window.tokens for window in turn] for turn in turns]
    errors = math.fsum(len(twins) * variance(twins) for twins in missed)
    return math.sqrt(errors) * _speed(turns) / sum(w.tokens for turn in turns for w in turn)


def _apart(turns: Sequence[_Turn]) -> float:
    first, second = (
        math.fsum(twin.seconds for twin in twins) for twins in zip(*turns, strict=True)
    )
    return round(first / second, 4)


def _half(interval: tuple[float, float]) -> float:
    return (interval[1] - interval[0]) / 2


def _speeds(seen: _Seen) -> dict[str, float]:
    return {name: round(_speed(turns), 1) for name, turns in seen.items()}


def _speed(turns: Sequence[_Turn]) -> float:
    windows = [window for turn in turns for window in turn]
    return sum(w.tokens for w in windows) / sum(w.seconds for w in windows)


def name_of(way: Strategy | StrategyPolicy) -> str:
    match way:
        case Off():
            return "off"
        case Draft(depth=depth, noise=noise):
            return f"draft {depth}" + (" with noise" if noise else "")
        case Ngram(tokens=tokens):
            return f"n-gram {tokens}"
        case _:
            return "adaptive"


if __name__ == "__main__":
    main()
