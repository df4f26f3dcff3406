"""A batch drains from 32 running answers to the last, longest one.

`python -m benchmarks.drain --out F.json [--rollouts N]`

Nothing refills it, as at the end of a step. Compared, on the same answers, in one run: `adaptive`,
which keeps what it learnt from one rollout to the next as in a job; the paper's bandit, likewise;
each fixed way; and an oracle that takes for each batch size what was the best fixed way in
`benchmarks.speculation` (from its committed result). CPU seconds, one thread.
"""

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.result import Claim, write_result
from benchmarks.speculating import ARMS, Requests, cpu_seconds, decode_by, engine
from benchmarks.speculation import name_of
from tlt.engine.native import NativeEngine
from tlt.policies.adaptive import AdaptivePolicy
from tlt.policies.bandit import BucketBandit
from tlt.policies.strategy import StrategyPolicy
from tlt.strategies import Off, Strategy

_RUNNING = 32
_SPECULATION = Path(__file__).resolve().parent / "results" / "speculation.json"
_BAR = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rollouts", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    seconds = _drains(arguments.rollouts, torch.device(arguments.device))
    ratios = {
        name: median(o / s for o, s in zip(seconds["oracle"], own, strict=True))
        for name, own in seconds.items()
    }
    claims = [
        Claim(name="speculation.drain_vs_oracle", value=ratios["adaptive"], unit="x", bar=_BAR)
    ]
    details = {
        "running_at_first": _RUNNING,
        "oracle": {batch: name_of(way) for batch, way in _best_ways().items()},
        "speed_against_the_oracle": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "seconds": {name: [round(s, 2) for s in own] for name, own in seconds.items()},
    }
    write_result("drain", claims, details, time.monotonic() - began, arguments.out)


def _best_ways() -> dict[int, Strategy]:
    ways = {name_of(arm): arm for arm in ARMS}
    batches = json.loads(_SPECULATION.read_text())["details"]["batches"]
    return {int(batch): ways[seen["best_fixed"]] for batch, seen in batches.items()}


def _drains(rollouts: int, device: torch.device) -> dict[str, list[float]]:
    """By way, the seconds of each rollout but the first, in which all are new to it."""
    ways: dict[str, Strategy | StrategyPolicy | None] = {
        "oracle": None,
        "adaptive": AdaptivePolicy(),
        "bandit": BucketBandit(),
        **{name_of(arm): arm for arm in ARMS},
    }
    engines = {name: engine(_RUNNING, device=device) for name in ways}
    requests = {name: Requests() for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    dice = random.Random(0)
    for rollout in range(rollouts + 1):
        for name in dice.sample(list(ways), len(ways)):
            spent = _drain(engines[name], requests[name], ways[name], device)
            if rollout:
                seconds[name].append(spent)
    return seconds


def _drain(
    made: NativeEngine,
    requests: Requests,
    way: Strategy | StrategyPolicy | None,
    device: torch.device,
) -> float:
    best = _best_ways()
    if way is not None:
        decode_by(made, way)
    made.submit(requests.take(_RUNNING))
    began = cpu_seconds(device)
    while made.running:
        if way is None:
            made.decode_with(_for_batch(best, made.running))
        made.step()
    return cpu_seconds(device) - began


def _for_batch(best: dict[int, Strategy], running: int) -> Strategy:
    return best.get(min(best, key=lambda batch: abs(batch - running)), Off())


if __name__ == "__main__":
    main()
