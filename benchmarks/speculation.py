"""What speculation gains at each batch size, and that it changes no token.

`python -m benchmarks.speculation --out F.json [--minutes N]`

The tiny reasoner answers held-out prompts in groups of 16, at temperature 1, one thread, float32,
log-probs and the states of four layers kept whichever way it decodes. A batch stays full. Ways of
decoding take turns in short windows, in random order, within one engine: `off`, `adaptive`, and
the fixed ones. Seconds are CPU seconds; a window's first steps, which switch, are not counted.
"""

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import torch

from benchmarks.result import Claim, write_result
from benchmarks.speculating import ARMS, Requests, cpu_seconds, decode_by, engine
from tlt.engine.base import Completion
from tlt.engine.native import NativeEngine
from tlt.policies.adaptive import AdaptivePolicy
from tlt.policies.strategy import StrategyPolicy
from tlt.strategies import Draft, Ngram, Off, Strategy

_BARS = {1: 2.3, 4: 2.1, 8: 1.7, 16: 1.5, 32: 1.15}
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_WINDOW_SECONDS = 0.25
_SWITCHING_STEPS = 3
# of the ratio, to each side: 0.03 with room, for the next drawing says a little more or less
_INTERVAL = 0.027
# of the time, to find the best fixed way
_FINDING = 0.2
_RESAMPLES = 1000
_SEQUENCES = 5_000
_SEQUENCES_IN_DOUBLE = 500
_ANSWER = 32


class Window(NamedTuple):
    tokens: int
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=5, help="at most, for each batch size")
    parser.add_argument("--batches", type=int, nargs="+", default=_BATCHES)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    device = torch.device(arguments.device)
    shares = {
        "float32": _identical_share(torch.float32, _SEQUENCES, device),
        "float64": _identical_share(torch.float64, _SEQUENCES_IN_DOUBLE, device),
    }
    batches = {
        batch: _Batch(batch, device).measured(60 * arguments.minutes) for batch in arguments.batches
    }
    claims = [
        Claim(name="speculation.identical_share", value=shares["float32"], unit="", bar=0.999),
        Claim(name="speculation.identical_share.float64", value=shares["float64"], unit="", bar=1),
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
    details = {"sequences": _SEQUENCES, "identical": shares, "batches": batches}
    write_result("speculation", claims, details, time.monotonic() - began, arguments.out)


def _worst(name: str, key: str, batches: dict[int, dict[str, Any]], bar: float) -> Claim:
    return Claim(name=name, value=min(b[key] for b in batches.values()), unit="x", bar=bar)


def _identical_share(dtype: torch.dtype, sequences: int, device: torch.device) -> float:
    """Of short answers, decoded without and with ways that change at random between steps."""
    plain = _answers(engine(64, dtype=dtype, device=device), sequences, None)
    switching = _answers(engine(64, dtype=dtype, device=device), sequences, random.Random(1))
    same = sum(plain[id].tokens == completion.tokens for id, completion in switching.items())
    return same / sequences


def _answers(
    made: NativeEngine, sequences: int, dice: random.Random | None
) -> dict[int, Completion]:
    made.submit(Requests(seed=3).take(sequences, _ANSWER))
    done: dict[int, Completion] = {}
    while made.running:
        if dice is not None:
            made.decode_with(dice.choice(ARMS))
        done |= {completion.id: completion for completion in made.step()}
    return done


class _Batch:
    """One engine at one batch size, and what each way of decoding did in its windows."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self._batch = batch
        self._device = device
        self._engine = engine(batch, device=device)
        self._requests = Requests()
        self._adaptive = AdaptivePolicy()
        self._dice = random.Random(batch)
        self._seen: dict[str, list[Window]] = {}

    def measured(self, most_seconds: float) -> dict[str, Any]:
        """First it is found out which fixed way is the best, then that is compared."""
        began = time.monotonic()
        while time.monotonic() < began + _FINDING * most_seconds:
            self._take_turns([self._adaptive, *ARMS])
        found = {name_of(arm): _speed(self._seen[name_of(arm)]) for arm in ARMS}
        best = max((arm for arm in ARMS if arm != Off()), key=lambda arm: found[name_of(arm)])
        self._seen.clear()
        while time.monotonic() < began + most_seconds and not self._settled(name_of(best)):
            self._take_turns([Off(), self._adaptive, best])
        return self._summary(name_of(best), found)

    def _take_turns(self, ways: list[Strategy | StrategyPolicy]) -> None:
        for way in self._dice.sample(ways, len(ways)):
            self._window(way)

    def _window(self, way: Strategy | StrategyPolicy) -> None:
        # the same dice in each window would try the same arms, or none
        decode_by(self._engine, way, seed=self._dice.randrange(2**32))
        for _ in range(_SWITCHING_STEPS):
            self._step()
        self._engine.tallies()
        began = cpu_seconds(self._device)
        while cpu_seconds(self._device) < began + _WINDOW_SECONDS:
            self._step()
        seconds = cpu_seconds(self._device) - began
        tokens = sum(tally.tokens for tally in self._engine.tallies())
        self._seen.setdefault(name_of(way), []).append(Window(tokens, seconds))

    def _step(self) -> None:
        # one in waiting for each that runs: the batch is never short of one
        missing = 2 * self._batch - self._engine.running
        if missing > 0:
            self._engine.submit(self._requests.take(missing))
        self._engine.step()

    def _settled(self, best: str) -> bool:
        if len(self._seen.get("adaptive", ())) < 60:
            return False
        pairs = [self._interval("adaptive", other) for other in ("off", best)]
        return all((high - low) / (high + low) < _INTERVAL for low, high in pairs)

    def _interval(self, one: str, other: str) -> tuple[float, float]:
        """Where 95 % of the ratios lie when the turns are drawn again.

        The windows of one turn lie side by side: what runs is the same for all of them.
        """
        turns = list(zip(self._seen[one], self._seen[other], strict=True))
        ratios: list[float] = []
        for _ in range(_RESAMPLES):
            ones, others = zip(*self._dice.choices(turns, k=len(turns)), strict=True)
            ratios.append(_speed(ones) / _speed(others))
        cuts = quantiles(ratios, n=40)
        return cuts[0], cuts[-1]

    def _summary(self, best: str, found: dict[str, float]) -> dict[str, Any]:
        speeds = {name: _speed(windows) for name, windows in self._seen.items()}
        return {
            "adaptive_vs_off": speeds["adaptive"] / speeds["off"],
            "interval": self._interval("adaptive", "off"),
            "best_fixed": best,
            "adaptive_vs_best_fixed": speeds["adaptive"] / speeds[best],
            "interval_best": self._interval("adaptive", best),
            "tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()},
            "when_the_best_was_found": {name: round(speed, 1) for name, speed in found.items()},
            "windows": {name: len(windows) for name, windows in self._seen.items()},
        }


def _speed(windows: Sequence[Window]) -> float:
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
