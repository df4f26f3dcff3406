"""Measure what speculation gains and costs in SGLang, against servers without it and upstream's.

`python -m benchmarks.sglang_speculation --out F.json [--repetitions 3]`

Four servers answer the tiny reasoner's held-out problems at temperature 1, in turns: one without
speculation (off), one that could speculate but never does (zero), TLT's with a trained drafter, and
SGLang's own adaptive speculation with the same drafter. A rollout keeps a number of requests
running until its last ones end. In a drain 32 requests begin together and none follows. Answers
differ in their random draws, so speeds are compared: tokens by CPU seconds of SGLang's scheduler,
which other programs on the machine slow less than the wall clock's; medians of pairs next to each
other in time.
"""

import argparse
import asyncio
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import msgspec
import torch

from benchmarks.engine import MODEL
from benchmarks.result import Claim, write_result
from benchmarks.speculating import DRAFTER, Requests
from tlt.base.id_types import PolicyVersion
from tlt.base.strategies import Draft, Off, Strategy
from tlt.engine.base import Request
from tlt.engine.sglang.client import sglang_launcher
from tlt.engine.sglang.client.sglang_client import SglangClient
from tlt.engine.sglang.client.start_engine_with_tap import start_client
from tlt.engine.sglang.client.tap_slot_allocator import TapSlotAllocator
from tlt.engine.sglang.shared.scheduler_options import (
    SchedulerOptions,
    SpeculationOptions,
    without_noise,
)
from tlt.engine.sglang.shared.shared_hidden_state_buffer import Tap, TapShape
from tlt.models.config_json import read_config
from tlt.models.drafter_folder import read_drafter_config
from tlt.protocol.shared_values import StrategyTally
from tlt.spec.config import SpeculationSpec
from tlt.trainer.drafter.samples import state_layers

SPECULATION = SpeculationSpec(mode="adaptive")
SLOTS, CONTEXT, MOST = 32, 512, 96
# most tokens of an answer in a drain
_DRAINED = 384
FIRST = PolicyVersion(0)
CPU = torch.device("cpu")
# a rollout that computes may take five times as long
STUCK_SECONDS = 120
# rollouts by running requests: how many requests there are in all
_ROLLOUTS = {1: 2, 4: 8, 8: 16, 16: 24, 32: 48}
# one-sided 95 % of Student's t by the number of pairs, from two on
_T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)


class Rollout(NamedTuple):
    tokens: int
    # CPU seconds of the scheduler
    seconds: float
    wall: float
    tallies: tuple[StrategyTally, ...]

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Server:
    def __init__(
        self,
        client: SglangClient,
        tap: Tap,
        requests: Callable[[int, int], Sequence[Request]],
    ) -> None:
        """Decode what `requests` returns for a number of them and their most tokens."""
        self._client = client
        self._slots = TapSlotAllocator(len(tap.filled))
        self._requests = requests

    def decode(self, running: int, count: int, most: int) -> Rollout:
        """Decode `count` requests, of which at most `running` run at any time."""
        requests = self._requests(count, most)
        cpu, wall = self._cpu_seconds(), time.perf_counter()
        tokens = self._client.run(self._decode(requests, running))
        cpu, wall = self._cpu_seconds() - cpu, time.perf_counter() - wall
        return Rollout(tokens, cpu, wall, self._client.take_tallies())

    async def _decode(self, requests: Sequence[Request], running: int) -> int:
        room = asyncio.Semaphore(running)

        async def answer(request: Request) -> int:
            async with room:
                name = self._slots.take(request.prompt, "")
                try:
                    most = CONTEXT - len(request.prompt)
                    parts = self._client.generate(request, name, most, streamed=False)
                    return [len(part.tokens) async for part in parts][-1]
                finally:
                    self._slots.give_back(name.slot)

        return sum(await asyncio.gather(*map(answer, requests)))

    def _cpu_seconds(self) -> float:
        return sum(map(_cpu_seconds, self._client.schedulers))

    def close(self) -> None:
        self._client.close()


def _cpu_seconds(process: int) -> float:
    _, _, fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")
    user, system = fields.split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    repetitions: int = arguments.repetitions
    torch.set_num_threads(1)
    began = time.monotonic()
    zero = options_for(MODEL, DRAFTER, fixed=Off(), trained=False)
    starts: dict[str, Callable[[Path], tuple[SglangClient, Tap]]] = {
        "off": partial(start_server, MODEL, None),
        "zero": partial(start_server, MODEL, zero),
        "tlt": partial(start_server, MODEL, options_for(MODEL, DRAFTER)),
        "upstream": _start_upstream,
    }
    servers: dict[str, Server] = {}
    with ExitStack() as stack:
        for name, start in starts.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
            started = start(Path(folder))
            servers[name] = Server(*started, Requests(seed=1).take)
            stack.callback(servers[name].close)
        rollouts = {
            str(running): compare(servers, ("off", "zero", "tlt"), running, count, repetitions)
            for running, count in _ROLLOUTS.items()
        }
        drain = compare(servers, ("upstream", "tlt"), SLOTS, SLOTS, repetitions, _DRAINED)
    claims = [
        *(
            Claim(
                name=f"sglang_speculation.off_over_tlt.{running}",
                value=ratio(rollouts[running], "tlt", "off").estimate,
                unit="x",
                bar=1.5,
            )
            for running in ("4", "8")
        ),
        Claim(
            name="sglang_speculation.zero_over_off",
            value=max(1 / ratio(found, "zero", "off").estimate for found in rollouts.values()),
            unit="x",
            bar=1.05,
            less_is_better=True,
        ),
        Claim(
            name="sglang_speculation.zero_over_tlt_min",
            value=min(ratio(found, "tlt", "zero").estimate for found in rollouts.values()),
            unit="x",
            bar=0.97,
        ),
        Claim(
            name="sglang_speculation.drain_upstream_over_tlt",
            value=ratio(drain, "tlt", "upstream").estimate,
            unit="x",
            bar=1.0,
        ),
    ]
    details = {
        "running": {running: describe(found, "off") for running, found in rollouts.items()},
        "drain": describe(drain, "upstream"),
    }
    rounded = [msgspec.structs.replace(claim, value=round(claim.value, 3)) for claim in claims]
    write_result("sglang_speculation", rounded, details, time.monotonic() - began, arguments.out)


def compare(
    servers: dict[str, Server],
    names: Sequence[str],
    running: int,
    count: int,
    repetitions: int,
    most: int = MOST,
) -> dict[str, list[Rollout]]:
    """Let the servers decode in turns, the order reversed each time; the first turn warms up."""
    found: dict[str, list[Rollout]] = {name: [] for name in names}
    for turn in range(repetitions + 1):
        for name in names if turn % 2 else reversed(names):
            rollout = servers[name].decode(running, count, most)
            if turn:
                found[name].append(rollout)
    speeds = {name: round(median(r.speed for r in rollouts)) for name, rollouts in found.items()}
    print(f"{running} running, {count} requests: tokens a CPU second {speeds}", flush=True)
    return found


class Ratio(NamedTuple):
    estimate: float
    # one-sided 95 % bound
    low: float


def ratio(found: dict[str, list[Rollout]], name: str, base: str) -> Ratio:
    """Return the speed of one server by that of another: the median of neighbours in time."""
    logs = [math.log(a.speed / b.speed) for a, b in zip(found[name], found[base], strict=True)]
    error = stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    low = fmean(logs) - _T95[min(len(logs), len(_T95) + 1) - 2] * error
    return Ratio(math.exp(median(logs)), math.exp(low))


def describe(found: dict[str, list[Rollout]], base: str) -> dict[str, Any]:
    ratios = {name: ratio(found, name, base) for name in found if name != base}
    return {
        "tokens_per_cpu_second": {
            name: [round(rollout.speed, 1) for rollout in rollouts]
            for name, rollouts in found.items()
        },
        "tokens_per_second": {
            name: [round(rollout.tokens / rollout.wall, 1) for rollout in rollouts]
            for name, rollouts in found.items()
        },
        "speed_against_" + base: {
            name: {"estimate": round(ratio.estimate, 3), "low": round(ratio.low, 3)}
            for name, ratio in ratios.items()
        },
        "tlt": _describe_tallies([t for rollout in found["tlt"] for t in rollout.tallies]),
    }


def _describe_tallies(tallies: Sequence[StrategyTally]) -> dict[str, Any]:
    steps: dict[str, int] = {}
    for tally in tallies:
        name = "control run" if tally.control is not None else str(tally.strategy)
        steps[name] = steps.get(name, 0) + tally.steps
    rows = sum(tally.rows for tally in tallies)
    accept = sum(tally.tokens for tally in tallies) / rows if rows else 0.0
    return {"tokens_a_row_and_step": round(accept, 2), "steps": steps}


def options_for(
    policy: Path,
    drafter: Path,
    arms: Sequence[Strategy] = SPECULATION.arms,
    fixed: Strategy | None = None,
    trained: bool = True,
) -> SpeculationOptions:
    layout = read_drafter_config(drafter, read_config(policy).layers)
    return SpeculationOptions(
        algorithm="EAGLE" if layout.layout == "eagle" else "EAGLE3",
        drafter=str(drafter),
        trained=trained,
        layers=len(layout.captured),
        arms=tuple(dict.fromkeys(map(without_noise, arms))),
        fixed=fixed,
        control_share=SPECULATION.control_share if fixed is None else 0.0,
    )


def start_server(
    policy: Path,
    speculation: SpeculationOptions | None,
    folder: Path,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> tuple[SglangClient, Tap]:
    captured: tuple[int, ...] = ()
    if speculation is not None:
        layers = read_config(policy).layers
        config = read_drafter_config(Path(speculation.drafter), layers)
        captured = state_layers(config, layers)
    return start_client(
        policy,
        slots=SLOTS,
        max_context=CONTEXT,
        device=device,
        dtype=dtype,
        version=FIRST,
        folder=folder,
        stuck_seconds=STUCK_SECONDS,
        captured=captured,
        speculation=speculation,
    )


def _start_upstream(folder: Path) -> tuple[SglangClient, Tap]:
    """Start SGLang with its own worker, which chooses among its default draft lengths."""
    from sglang.srt.speculative.adaptive_spec_params import DEFAULT_ADAPTIVE_CONFIG

    shape = TapShape(slots=2 * SLOTS, positions=CONTEXT, layers=0, hidden=1, dtype="float32")
    path, adaptive = folder / "tap", folder / "adaptive.json"
    hooks = SchedulerOptions(tap=str(path), shape=shape, device=str(CPU))
    adaptive.write_bytes(msgspec.json.encode(DEFAULT_ADAPTIVE_CONFIG))
    tap = Tap.create(path, shape)
    launched = sglang_launcher.start(
        sglang_launcher.Options(
            model=MODEL,
            device=CPU,
            dtype=torch.float32,
            slots=SLOTS,
            max_context=CONTEXT,
            speculation=options_for(MODEL, DRAFTER, [Draft(depth=depth) for depth in (1, 3, 5, 7)]),
            adaptive_config=adaptive,
            environment=hooks.environment(),
        ),
        folder / "sglang.log",
    )
    return SglangClient(launched, torch.float32, (), STUCK_SECONDS), tap


if __name__ == "__main__":
    main()
