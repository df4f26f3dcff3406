"""Measure SGLang: start time, memory, and the cost of capturing hidden states.

`python -m benchmarks.sglang --out F.json`

The tiny reasoner decodes eight requests of a fixed length in float32, in turns with and without
capturing the states of three layers and the last one. Tokens per second are by wall time.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.engine import MODEL, random_prompts, request
from benchmarks.result import Claim, write_result
from tlt.base.id_types import PolicyVersion
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.engine.sglang.client.start_engine_with_tap import start_client
from tlt.models.config_json import read_config
from tlt.models.drafter_folder import default_captured_layers

_SLOTS, _CONTEXT = 8, 1024
_ANSWER = 160
_REPETITIONS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    device = torch.device(arguments.device)
    layers = read_config(MODEL).layers
    plain, plain_seconds = _start(device, ())
    held = _memory()
    tapped, tapped_seconds = _start(device, (*default_captured_layers(layers), layers))
    speeds: dict[str, list[float]] = {"plain": [], "tapped": []}
    for attempt in range(-1, _REPETITIONS):
        for name, engine in (("plain", plain), ("tapped", tapped)):
            speed = _tokens_per_second(engine, attempt)
            if attempt >= 0:
                speeds[name].append(speed)
    plain.close()
    tapped.close()
    kept = median(t / p for t, p in zip(speeds["tapped"], speeds["plain"], strict=True))
    seconds = max(plain_seconds, tapped_seconds)
    claims = [
        Claim(name="sglang.start", value=seconds, unit="s", bar=15, less_is_better=True),
        Claim(name="sglang.memory", value=held / 1e9, unit="GB", bar=1.2, less_is_better=True),
    ]
    details: dict[str, Any] = {
        "start_seconds": {"plain": round(plain_seconds, 1), "tapped": round(tapped_seconds, 1)},
        "tokens_per_second": {name: round(median(found), 1) for name, found in speeds.items()},
        "tapped_over_plain": round(kept, 3),
    }
    write_result("sglang", claims, details, time.monotonic() - began, arguments.out)


def _start(device: torch.device, captured: Sequence[int]) -> tuple[SglangEngine, float]:
    began = time.perf_counter()
    version = PolicyVersion(0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        server, tap = start_client(
            MODEL,
            slots=_SLOTS,
            max_context=_CONTEXT,
            device=device,
            dtype=torch.float32,
            version=version,
            folder=Path(folder),
            stuck_seconds=60,
            captured=captured,
        )
    seconds = time.perf_counter() - began
    engine = SglangEngine(server, MODEL, tap, lambda tokens: "", _SLOTS, _CONTEXT, version)
    return engine, seconds


def _memory() -> int:
    """Return the memory of this process and its children, with shared pages counted once."""
    total = 0
    for pid in (os.getpid(), *_children(os.getpid())):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        line = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
        total += int(line.split()[1]) * 1024
    return total


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _tokens_per_second(engine: SglangEngine, seed: int) -> float:
    prompts = random_prompts(_SLOTS, seed)
    began = time.perf_counter()
    engine.submit([request(i, prompt, _ANSWER) for i, prompt in enumerate(prompts)])
    while engine.running:
        engine.step()
    return _SLOTS * _ANSWER / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
