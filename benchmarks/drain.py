"""Measure a batch that drains from 32 running answers to the longest one.

`python -m benchmarks.drain --out F.json [--rollouts N]`

Nothing refills the batch, as at the end of a step. On the same answers it compares `adaptive` and
the paper's bandit, which both keep their measurements between rollouts as in a job, each fixed
strategy, and an oracle that uses for each batch size the best fixed strategy of
`benchmarks.speculation` (its result beside --out, or the committed one). CPU seconds, one thread.
"""

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median, quantiles

import torch

from benchmarks.bandit import BucketBandit
from benchmarks.result import Claim, write_result
from benchmarks.speculating import ARMS, Requests, cpu_seconds, decode_by, engine
from benchmarks.speculation import name_of
from tlt.engine.native import NativeEngine
from tlt.policies.speculation.adaptive_strategy import AdaptivePolicy
from tlt.policies.speculation.strategy_policy import StrategyPolicy
from tlt.strategies import Off, Strategy

_RUNNING = 32
_RESULTS = Path(__file__).resolve().parent / "results"
_RESAMPLES = 2000
_BAR = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rollouts", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    best = _best_strategies(arguments.out)
    seconds = _drain_seconds(best, arguments.rollouts, torch.device(arguments.device))
    pairs = {
        name: [o / s for o, s in zip(seconds["oracle"], own, strict=True)]
        for name, own in seconds.items()
    }
    ratios = {name: median(own) for name, own in pairs.items()}
    claims = [
        Claim(name="speculation.drain_vs_oracle", value=ratios["adaptive"], unit="x", bar=_BAR)
    ]
    details = {
        "running_at_first": _RUNNING,
        "oracle": {batch: name_of(strategy) for batch, strategy in best.items()},
        "speed_against_the_oracle": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "interval": _interval(pairs["adaptive"]),
        "seconds": {name: [round(s, 2) for s in own] for name, own in seconds.items()},
    }
    write_result("drain", claims, details, time.monotonic() - began, arguments.out)


def _best_strategies(out: Path | None) -> dict[int, Strategy]:
    folders = [_RESULTS] if out is None else [out.parent, _RESULTS]
    files = [folder / "speculation.json" for folder in folders]
    strategies = {name_of(arm): arm for arm in ARMS}
    batches = json.loads(next(filter(Path.exists, files)).read_text())["details"]["batches"]
    return {int(batch): strategies[seen["best_fixed"]] for batch, seen in batches.items()}


def _interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median over rollouts."""
    dice = random.Random(1)
    medians = [median(dice.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES)]
    cuts = quantiles(medians, n=40)
    return cuts[0], cuts[-1]


def _drain_seconds(
    best: dict[int, Strategy], rollouts: int, device: torch.device
) -> dict[str, list[float]]:
    """Return each strategy's seconds by rollout, without the first, a warm-up."""
    strategies: dict[str, Strategy | StrategyPolicy | None] = {
        "oracle": None,
        "adaptive": AdaptivePolicy(),
        "bandit": BucketBandit(),
        **{name_of(arm): arm for arm in ARMS},
    }
    engines = {name: engine(_RUNNING, device=device) for name in strategies}
    requests = {name: Requests() for name in strategies}
    seconds: dict[str, list[float]] = {name: [] for name in strategies}
    dice = random.Random(0)
    for rollout in range(rollouts + 1):
        for name in dice.sample(list(strategies), len(strategies)):
            strategy = strategies[name] or best
            # the seed differs between rollouts
            spent = _drain(engines[name], requests[name], strategy, rollout, device)
            if rollout:
                seconds[name].append(spent)
    return seconds


def _drain(
    made: NativeEngine,
    requests: Requests,
    strategy: Strategy | StrategyPolicy | dict[int, Strategy],
    seed: int,
    device: torch.device,
) -> float:
    if not isinstance(strategy, dict):
        decode_by(made, strategy, seed)
    made.submit(requests.take(_RUNNING))
    began = cpu_seconds(device)
    while made.running:
        if isinstance(strategy, dict):
            made.speculation.set_strategy(_for_batch(strategy, made.running))
        made.step()
    return cpu_seconds(device) - began


def _for_batch(best: dict[int, Strategy], running: int) -> Strategy:
    return best.get(min(best, key=lambda batch: abs(batch - running)), Off())


if __name__ == "__main__":
    main()
