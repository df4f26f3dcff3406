"""Measure the speed-up of speculation at each batch size.

`python -m benchmarks.speculation --out F.json [--minutes N]`

The tiny reasoner answers held-out prompts in groups of 16 at temperature 1, in one thread and
float32, with log-probs and the states of four layers kept, at a full batch. Each strategy (`off`,
`adaptive` and the three best fixed ones) has its own engine. All get the same requests and, as
speculation changes no token, produce the same answers: only CPU seconds differ. They take turns in
random order.

First `adaptive` is compared with the fixed strategies: the best one of every other turn is its
rival in the turns between. Then `adaptive` is compared with `off`, which gets a quarter of the
tokens, as its speed hardly depends on them. Both have twins that decode the same: their difference
shows how much of a ratio is chance. An interval over other answers is reported as well.
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
from tlt.base.strategies import Draft, Ngram, Off, Strategy
from tlt.policies.speculation.adaptive_strategy import AdaptivePolicy
from tlt.policies.speculation.strategy_policy import StrategyPolicy

_BARS = {1: 2.3, 4: 2.1, 8: 1.7, 16: 1.5, 32: 1.15}
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
# tokens of a turn with speculation
_TURN_SECONDS = 0.5
# decode steps between two checks of the total
_STEPS = 4
# answers of each row before measuring: the first ones to finish are short
_WARM_UP = 3
# half-width of a ratio's interval: 0.03 with a margin for the bootstrap's own noise
_INTERVAL = 0.027
# and relative to the ratio, for other answers
_INTERVAL_OVER_TURNS = 0.03
# share of the time to find the best fixed strategies, their number, and the share to compare them
_FINDING, _COMPARING = 0.1, 0.2
_CANDIDATES = 3
# share of a turn's tokens for `off`
_PLAIN = 0.25
_LEAST_TURNS, _CHECK_TURNS = 24, 8
_RESAMPLES = 1000
_TWINS = 2
# standard deviations within which 95 % of a normal distribution lie
_NORMAL_95 = 1.96


class Window(NamedTuple):
    tokens: int
    seconds: float


# seconds of each twin
_Turn = tuple[Window, ...]
_Windows = dict[str, list[_Turn]]


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
        batch: _Batch(batch, device).measure(60 * arguments.minutes) for batch in arguments.batches
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
    """An engine that decodes with one strategy."""

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
        self._count_tokens()

    def decode_by(self, strategy: Strategy | StrategyPolicy, seed: int) -> None:
        decode_by(self._engine, strategy, seed)

    def decode_to(self, tokens: int) -> Window:
        """Decode until the total is reached."""
        return self._decode(lambda: self.tokens >= tokens)

    def decode_for(self, seconds: float) -> Window:
        end = cpu_seconds(self._device) + seconds
        return self._decode(lambda: cpu_seconds(self._device) >= end)

    def _decode(self, done: Callable[[], bool]) -> Window:
        began, before = cpu_seconds(self._device), self.tokens
        while not done():
            for _ in range(_STEPS):
                self._step()
            self._count_tokens()
        return Window(self.tokens - before, cpu_seconds(self._device) - began)

    def _count_tokens(self) -> None:
        self.tokens += sum(tally.tokens for tally in self._engine.take_strategy_tallies())

    def _step(self) -> int:
        """Take one step and return the number of finished answers."""
        # as many waiting requests as running ones keep the batch full
        missing = 2 * self._batch - self._engine.running
        if missing > 0:
            self._engine.submit(self._requests.take(missing))
        return len(self._engine.step())


class _Batch:
    """Tokens and seconds of each strategy by turn, at one batch size."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self._batch = batch
        self._device = device
        self._dice = random.Random(batch)

    def measure(self, most_seconds: float) -> dict[str, Any]:
        """Find the fixed strategies that may be best, then compare those."""
        found = self._speeds_of_fixed(_FINDING * most_seconds)
        guessing = [arm for arm in ARMS if arm != Off()]
        candidates = sorted(guessing, key=lambda arm: -found[name_of(arm)])[:_CANDIDATES]
        names = [name_of(strategy) for strategy in candidates]
        each = round(_TURN_SECONDS * found[names[0]])
        closely = self._turns(
            {
                name_of(strategy): [self._lane(strategy)]
                for strategy in (AdaptivePolicy(), *candidates)
            },
            dict.fromkeys(("adaptive", *names), each),
            lambda seen: (
                _half_width(self._interval_over_turns(seen["adaptive"], _best_fixed(seen, names)))
                < _INTERVAL
            ),
            _COMPARING * most_seconds,
        )
        plainly = self._turns(
            {
                name_of(strategy): [self._lane(strategy) for _ in range(_TWINS)]
                for strategy in (AdaptivePolicy(), Off())
            },
            {"adaptive": each, "off": round(_PLAIN * each)},
            self._is_precise,
            (1 - _FINDING - _COMPARING) * most_seconds,
        )
        return self._summary(names, found, closely, plainly)

    def _turns(
        self,
        lanes: dict[str, list[_Lane]],
        each: dict[str, int],
        enough: Callable[[_Windows], bool],
        most_seconds: float,
    ) -> _Windows:
        """Take turns until the interval is narrow enough or the time is over."""
        seen: _Windows = {name: [] for name in lanes}
        all_ = [(name, twin) for name, twins in lanes.items() for twin in range(len(twins))]
        # the first turn is a warm-up
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
            if turns >= _LEAST_TURNS and turns % _CHECK_TURNS == 0 and enough(seen):
                break
        return seen

    def _is_precise(self, seen: _Windows) -> bool:
        adaptive, off = seen["adaptive"], seen["off"]
        others = (
            _half_width(self._interval_over_turns(adaptive, off)) * _speed(off) / _speed(adaptive)
        )
        return (
            _half_width(_interval_over_repetitions(adaptive, off)) < _INTERVAL
            and others < _INTERVAL_OVER_TURNS
        )

    def _speeds_of_fixed(self, seconds: float) -> dict[str, float]:
        """Return the tokens per second of each fixed strategy."""
        lane, seen = self._lane(Off()), _Windows()
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            for arm in self._dice.sample(ARMS, len(ARMS)):
                lane.decode_by(arm, seed=0)
                lane.decode_for(_TURN_SECONDS / 5)
                seen.setdefault(name_of(arm), []).append((lane.decode_for(_TURN_SECONDS),))
        return {name: _speed(windows) for name, windows in seen.items()}

    def _lane(self, strategy: Strategy | StrategyPolicy) -> _Lane:
        lane = _Lane(self._batch, self._device)
        lane.warm_up()
        lane.decode_by(strategy, seed=self._dice.randrange(2**32))
        return lane

    def _interval_over_turns(
        self, own: Sequence[_Turn], others: Sequence[_Turn]
    ) -> tuple[float, float]:
        """Return the 95 % bootstrap interval of the speed ratio over turns."""
        turns = list(zip(own, others, strict=True))
        ratios: list[float] = []
        for _ in range(_RESAMPLES):
            ones, against = zip(*self._dice.choices(turns, k=len(turns)), strict=True)
            ratios.append(_speed(ones) / _speed(against))
        cuts = quantiles(ratios, n=40)
        return cuts[0], cuts[-1]

    def _summary(
        self,
        candidates: Sequence[str],
        found: dict[str, float],
        closely: _Windows,
        plainly: _Windows,
    ) -> dict[str, Any]:
        best = _best_fixed(closely, candidates)
        adaptive, off = plainly["adaptive"], plainly["off"]
        return {
            "adaptive_vs_off": _speed(adaptive) / _speed(off),
            "interval": _interval_over_repetitions(adaptive, off),
            # ratio of the first twin's seconds to the second's
            "twins": {name: _ratio_of_twins(turns) for name, turns in plainly.items()},
            "interval_with_other_answers": self._interval_over_turns(adaptive, off),
            "best_fixed": max(candidates, key=lambda name: _speed(closely[name])),
            "adaptive_vs_best_fixed": _speed(closely["adaptive"]) / _speed(best),
            "interval_best": self._interval_over_turns(closely["adaptive"], best),
            "tokens_per_second": _speeds(plainly),
            "tokens_per_second_beside_candidates": _speeds(closely),
            "when_candidates_were_found": {n: round(speed, 1) for n, speed in found.items()},
            "turns": len(adaptive),
            "turns_beside_candidates": len(best),
        }


def _best_fixed(seen: _Windows, names: Sequence[str]) -> list[_Turn]:
    """Return for each turn the strategy that was best in every other turn from the next on."""
    best = [max(names, key=lambda name: _speed(seen[name][1 - half :: 2])) for half in (0, 1)]
    return [seen[best[turn % 2]][turn] for turn in range(len(seen[names[0]]))]


def _interval_over_repetitions(
    own: Sequence[_Turn], others: Sequence[_Turn]
) -> tuple[float, float]:
    """Return the 95 % interval of the speed ratio over repetitions of the same answers."""
    ratio = _speed(own) / _speed(others)
    apart = _NORMAL_95 * ratio * math.hypot(_relative_error(own), _relative_error(others))
    return ratio - apart, ratio + apart


def _relative_error(turns: Sequence[_Turn]) -> float:
    """Return the relative standard error of the seconds, from twins, which differ by chance alone.

    The effect of different token counts within a turn is removed first.
    """
    pace = 1.0 / _speed(turns)
    missed = [[window.seconds - pace * window.tokens for window in turn] for turn in turns]
    errors = math.fsum(len(twins) * variance(twins) for twins in missed)
    return math.sqrt(errors) * _speed(turns) / sum(w.tokens for turn in turns for w in turn)


def _ratio_of_twins(turns: Sequence[_Turn]) -> float:
    first, second = (
        math.fsum(twin.seconds for twin in twins) for twins in zip(*turns, strict=True)
    )
    return round(first / second, 4)


def _half_width(interval: tuple[float, float]) -> float:
    return (interval[1] - interval[0]) / 2


def _speeds(seen: _Windows) -> dict[str, float]:
    return {name: round(_speed(turns), 1) for name, turns in seen.items()}


def _speed(turns: Sequence[_Turn]) -> float:
    windows = [window for turn in turns for window in turn]
    return sum(w.tokens for w in windows) / sum(w.seconds for w in windows)


def name_of(strategy: Strategy | StrategyPolicy) -> str:
    match strategy:
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
