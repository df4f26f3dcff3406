"""Decode one rollout batch with several numbers of slots: is an engine's share of it the fastest?

`python -m benchmarks.slots --out F.json [--folder F]`

Three models: the tiny reasoner, SmolLM2-135M (made in TLT's home if it isn't there), and random
weights in the shape of Qwen2.5-0.5B. Answers have lengths with a long tail, drawn once for all; no
token ends one. The native engine's seconds are CPU seconds of one thread, SGLang's those of its
scheduler. With `auto` an engine has a slot for each of its answers, as long as memory lasts.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.engine import MODEL, request
from benchmarks.random_policy import HALF_BILLION, write_policy
from benchmarks.result import at_most, write_result
from benchmarks.sglang_speculation import Server
from examples.smollm2.prepare import prepare
from tlt.base.available_memory import available_memory
from tlt.base.id_types import PolicyVersion
from tlt.engine.base import Request
from tlt.engine.native import NativeEngine
from tlt.engine.sglang.client.start_engine_with_tap import start_client
from tlt.memory_plan import DevicePlan, Spread
from tlt.models.config_json import read_config
from tlt.models.decoder_from_folder import load_decoder
from tlt.protocol.shared_values import SizingFacts
from tlt.ranks.size_choice import choose_sizes
from tlt.spec.config import JobSpec

_SLOTS = (16, 32, 64, 128)
_ANSWERS, _PROMPT, _CONTEXT = 128, 32, 256
# the measured part of the batch for the largest model: decoding it takes minutes
_LONGEST = {"tiny reasoner": 192, "SmolLM2-135M": 128, "Qwen2.5-0.5B's shape": 64}
_BAR = 1.1
_CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tlt-slots")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    models = {
        "tiny reasoner": MODEL,
        "SmolLM2-135M": prepare(print),
        "Qwen2.5-0.5B's shape": _random_weights(arguments.folder),
    }
    chosen = {name: _chosen(folder) for name, folder in models.items()}
    found: dict[str, dict[int, float]] = {}
    for name, folder in models.items():
        found[name] = {slots: _native(folder, slots, _LONGEST[name]) for slots in _SLOTS}
        print(name, found[name], flush=True)
    sglang = _sglang(models["SmolLM2-135M"])
    claims = [
        at_most(f"slots.auto_over_best.{name}", each[chosen[name]] / min(each.values()), "x", _BAR)
        for name, each in found.items()
    ]
    claims.append(at_most("slots.sglang_64_over_16", sglang[64] / sglang[16], "x", _BAR))
    details: dict[str, Any] = {
        "answers": _ANSWERS,
        "chosen": chosen,
        "cpu_seconds_by_slots": found,
        "sglang_cpu_seconds_by_running": sglang,
    }
    write_result("slots", claims, details, time.monotonic() - began, arguments.out)


def _random_weights(folder: Path) -> Path:
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_policy(folder, HALF_BILLION)
    return folder


def _chosen(folder: Path) -> int:
    """Return the slots that a job of one rank chooses on this host."""
    spec = msgspec.convert(
        {
            "name": "slots",
            "policy": {"path": str(folder), "max_context": _CONTEXT},
            "data": {"train": str(folder / "none.jsonl")},
            "reward": {"kind": "numeric"},
            "algorithm": {"steps": 1, "prompts_per_step": _ANSWERS // 8, "group_size": 8},
        },
        JobSpec,
    )
    device = DevicePlan(hosts=1, devices=1, memory=available_memory(), kind="CPU", type="cpu")
    spread = Spread(ranks=1, shards=1, tensor_parallel=1, device="cpu")
    return choose_sizes(spec, SizingFacts(ranks=1, answers=_ANSWERS), device, spread).sizes.slots


def _requests(count: int, longest: int, vocabulary: int) -> Sequence[Request]:
    """Draw prompts, and lengths of which half are below a quarter of the longest."""
    drawn = random.Random(0)
    return [
        request(
            index,
            [drawn.randrange(3, min(vocabulary, 1000)) for _ in range(_PROMPT)],
            max(1, min(longest, round(longest / 4 * drawn.lognormvariate(0, 0.8)))),
        )
        for index in range(count)
    ]


def _native(folder: Path, slots: int, longest: int) -> float:
    decoder = load_decoder(folder)
    engine = NativeEngine(
        decoder,
        decode_text=lambda tokens: "",
        slots=slots,
        max_context=_CONTEXT,
        device=_CPU,
        version=PolicyVersion(0),
    )
    engine.submit(_requests(_ANSWERS, longest, decoder.config.vocabulary))
    began = time.process_time()
    while engine.running:
        engine.step()
    seconds = time.process_time() - began
    engine.close()
    return round(seconds, 1)


def _sglang(model: Path) -> dict[int, float]:
    vocabulary = read_config(model).vocabulary
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        started = start_client(
            model,
            slots=64,
            max_context=_CONTEXT,
            device=_CPU,
            dtype=torch.float32,
            version=PolicyVersion(0),
            folder=Path(folder),
            stuck_seconds=600,
        )
        server = Server(*started, lambda count, most: _requests(count, most, vocabulary))
        try:
            server.decode(16, 16, 16)
            return {
                running: round(server.decode(running, _ANSWERS, 128).seconds, 1)
                for running in (16, 64)
            }
        finally:
            server.close()


if __name__ == "__main__":
    main()
