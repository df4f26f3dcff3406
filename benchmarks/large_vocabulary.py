"""Measure the cost of sampling with a large vocabulary.

`python -m benchmarks.large_vocabulary --out F.json`

Random weights of the shape of Qwen2.5-0.5B decode in float32 on one thread, plainly and with a
random drafter, whose proposals are sampled as well. Sampling is everything from logits to tokens:
noise, scores, argmax, log-probs, both of proposals and of verified tokens; the heads' matrix
products don't count. Its share is that of a whole step, proposing included. Seconds are the
thread's CPU seconds, so that other processes don't count.
"""

import argparse
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from benchmarks.engine import random_prompts, request
from benchmarks.result import Claim, write_result
from tlt.engine.base import Sampling
from tlt.engine.native import NativeEngine
from tlt.engine.native.token_sampler import Sampler
from tlt.id_types import DrafterVersion, PolicyVersion
from tlt.models.decoder_spec import Decoder, DecoderConfig, weight_shapes
from tlt.models.eagle_drafter import Drafter, DrafterConfig, new_drafter
from tlt.models.rope import PlainRope
from tlt.strategies import Draft, Off, Strategy

_SHAPE = DecoderConfig(
    vocabulary=151_936,
    hidden=896,
    intermediate=4864,
    layers=24,
    heads=14,
    kv_heads=2,
    head_dim=64,
    norm_eps=1e-6,
    rope=PlainRope(theta=1e6),
    max_positions=32_768,
    tied=True,
    qkv_bias=True,
    out_bias=False,
    mlp_bias=False,
    head_norms=False,
)
_BATCHES = (1, 4, 8)
_CONTEXT = 256
_STEPS = 9
_STRATEGIES: dict[str, tuple[Strategy, float]] = {
    "plain": (Off(), 0.15),
    "verify": (Draft(depth=4), 0.25),
}
_SAMPLINGS = {
    "": Sampling(),
    ".top_k": Sampling(top_k=50),
    # a filter keeps nearly all of almost equal logits, which no trained model has
    ".top_p": Sampling(top_p=0.95),
}
_WITHOUT_CLAIM = ".top_p"
# tolerance of the stated memory in both directions
_MEMORY = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    decoder, drafter = _random_policy(), _random_drafter()
    before = _resident() + sum(weight.nbytes for weight in decoder.weights.values())
    engine = _engine(decoder, drafter)
    details: dict[str, Any] = {"context": _CONTEXT, "steps": _STEPS, "slots": max(_BATCHES)}
    claims: list[Claim] = []
    taken = 0
    for (filters, sampling), (name, (strategy, bar)) in product(
        _SAMPLINGS.items(), _STRATEGIES.items()
    ):
        measured = {batch: _measure(engine, strategy, sampling, batch) for batch in _BATCHES}
        if filters != _WITHOUT_CLAIM:
            claims.append(
                Claim(
                    name=f"speculation.large_vocab_sampling_share.{name}{filters}",
                    value=max(by["share"] for by in measured.values()),
                    unit="of a step",
                    bar=bar,
                    less_is_better=True,
                )
            )
        details[name + filters] = {"by_batch": measured}
        if not filters:
            # allocators keep the temporary memory of filters
            taken = _resident() - before
    claims.append(
        Claim(
            name="speculation.large_vocab_memory",
            value=taken / engine.memory_bytes,
            unit="of the stated bytes",
            bar=_MEMORY,
            less_is_better=True,
        )
    )
    details["memory_stated_bytes"] = engine.memory_bytes
    details["memory_taken_bytes"] = taken
    write_result("large_vocabulary", claims, details, time.monotonic() - began, arguments.out)


def _random_policy() -> Decoder:
    torch.manual_seed(1)
    weights = {
        name: torch.ones(shape) if "norm" in name else torch.empty(shape).normal_(std=0.02)
        for name, shape in weight_shapes(_SHAPE).items()
    }
    return Decoder(config=_SHAPE, weights=weights)


def _random_drafter() -> Drafter:
    return new_drafter(
        DrafterConfig(
            layout="eagle",
            hidden=_SHAPE.hidden,
            intermediate=_SHAPE.intermediate,
            heads=_SHAPE.heads,
            kv_heads=_SHAPE.kv_heads,
            head_dim=_SHAPE.head_dim,
            norm_eps=_SHAPE.norm_eps,
            rope=_SHAPE.rope,
            max_positions=_SHAPE.max_positions,
            vocabulary=_SHAPE.vocabulary,
            captured=(_SHAPE.layers,),
        )
    )


def _engine(decoder: Decoder, drafter: Drafter) -> NativeEngine:
    engine = NativeEngine(
        decoder,
        decode_text=lambda tokens: "",
        slots=max(_BATCHES),
        max_context=_CONTEXT,
        device=torch.device("cpu"),
        version=PolicyVersion(0),
        captured=(_SHAPE.layers,),
        arms=[strategy for strategy, _ in _STRATEGIES.values()],
    )
    engine.speculation.adopt_drafter(DrafterVersion(1), drafter)
    return engine


def _measure(
    engine: NativeEngine, strategy: Strategy, sampling: Sampling, batch: int
) -> dict[str, float]:
    """Return medians over steps without the first two, which prefill."""
    engine.speculation.set_strategy(strategy)
    requests = [request(i, p, _CONTEXT) for i, p in enumerate(random_prompts(batch, 0))]
    engine.submit([msgspec.structs.replace(one, sampling=sampling) for one in requests])
    steps: list[tuple[float, dict[str, float]]] = []
    for _ in range(_STEPS + 2):
        with _time_sampling() as spent:
            started = time.thread_time()
            engine.step()
            steps.append((time.thread_time() - started, spent))
    engine.cancel(range(batch))
    engine.step()
    steps = steps[2:]
    milliseconds = {
        f"{part}_milliseconds": round(1e3 * median(spent[part] for _, spent in steps), 2)
        for part in ("noise", "guess", "draw")
    }
    return {
        "share": round(median(sum(spent.values()) / seconds for seconds, spent in steps), 4),
        "step_milliseconds": round(1e3 * median(seconds for seconds, _ in steps), 1),
        **milliseconds,
    }


@contextmanager
def _time_sampling() -> Generator[dict[str, float]]:
    spent = {"noise": 0.0, "guess": 0.0, "draw": 0.0}

    def timed(part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            started = time.thread_time()
            result = work(*arguments)
            spent[part] += time.thread_time() - started
            return result

        return run

    with (
        patch.object(Sampler, "noise", timed("noise", Sampler.noise)),
        patch.object(Sampler, "sample_drafts", timed("guess", Sampler.sample_drafts)),
        patch.object(Sampler, "draw", timed("draw", Sampler.draw)),
    ):
        yield spent


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


if __name__ == "__main__":
    main()
