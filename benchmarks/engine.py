"""Compare the native engine with Transformers' `generate`, and over its number of slots.

`python -m benchmarks.engine --out F.json`

Both sides decode the tiny reasoner's weights in float32 on one thread, prompts included. Against
`generate` (KV cache, SDPA, no scores) every sequence has the same length, so that continuous
batching gains nothing; ours also returns log-probs and keeps the hidden states of four layers.
Seconds are CPU seconds, so that other processes don't count.
"""

import argparse
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.result import Claim, write_result
from tlt.base.id_types import Member, PolicyVersion, PromptIndex, Step
from tlt.data.dataset import read_rows
from tlt.engine.base import NoiseKey, Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.engine.native.decode_attention_kernels import CompiledWindowAttention
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.tokenizer import Tokenizer
from tlt.spec.spec_files import load_job_spec

_ROOT = Path(__file__).resolve().parent.parent
MODEL = _ROOT / "examples" / "tiny_reasoner" / "model"
_BARS = {1: 3.0, 4: 2.2, 16: 1.5, 64: 1.1}
_PROMPT, _ANSWER = 32, 224
_PAIRS = 7
_SLOTS = (1, 2, 4, 8, 16, 32, 64)
_REPETITIONS = 3
_ROLLOUTS = 64
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")
# the profiler knows torch's operators; the one in C is recorded by name
_ATTENTION = ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention in C")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    device = torch.device(arguments.device)
    ratios, fixed = _against_generate(device)
    rollouts = _by_slots(device)
    best = max(rollouts, key=lambda slots: rollouts[slots])
    details: dict[str, Any] = {
        "prompt_tokens": _PROMPT,
        "answer_tokens": _ANSWER,
        "pairs": _PAIRS,
        "fixed_length": fixed,
        "rollout_tokens_per_second_by_slots": rollouts,
        "best_slots": best,
        "attention_in_c_against_torch": _against_torch(device),
        "share_of_time": {batch: _shares(batch, device) for batch in _BARS},
    }
    claims = [
        Claim(name=f"engine.speedup.batch{batch}", value=ratios[batch], unit="x", bar=bar)
        for batch, bar in _BARS.items()
    ]
    write_result("engine", claims, details, time.monotonic() - began, arguments.out)


def _against_generate(device: torch.device) -> tuple[dict[int, float], dict[int, Any]]:
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="sdpa"
    )
    nn.Module.to(model, device).eval()
    engines = {batch: _engine(batch, _PROMPT + _ANSWER, device) for batch in _BARS}
    theirs: dict[int, list[float]] = {batch: [] for batch in _BARS}
    ours: dict[int, list[float]] = {batch: [] for batch in _BARS}
    for attempt in range(-1, _PAIRS):  # the first is a warm-up
        for batch in _BARS:
            prompts = random_prompts(batch, attempt)
            pair = (
                _seconds(device, lambda: _generate(model, prompts)),  # noqa: B023
                _seconds(device, lambda: _decode(engines[batch], prompts, _ANSWER)),  # noqa: B023
            )
            if attempt >= 0:
                theirs[batch].append(batch * _ANSWER / pair[0])
                ours[batch].append(batch * _ANSWER / pair[1])
    ratios = {
        batch: median(o / t for o, t in zip(ours[batch], theirs[batch], strict=True))
        for batch in _BARS
    }
    return ratios, {
        batch: {
            "generate_tokens_per_second": round(median(theirs[batch]), 1),
            "engine_tokens_per_second": round(median(ours[batch]), 1),
            "ratios": [round(o / t, 2) for o, t in zip(ours[batch], theirs[batch], strict=True)],
        }
        for batch in _BARS
    }


def _against_torch(device: torch.device) -> dict[int, float]:
    """Measure what attention in C gains over attention in torch."""
    found: dict[int, float] = {}
    for batch in _BARS:
        engines = [_engine(batch, _PROMPT + _ANSWER, device)]
        with patch("tlt.engine.native.kv_cache_attention.find_kernel", lambda *shape: None):
            engines.append(_engine(batch, _PROMPT + _ANSWER, device))
        ratios: list[float] = []
        for attempt in range(-1, _PAIRS):
            prompts = random_prompts(batch, attempt)
            ours, theirs = (
                _seconds(device, lambda: _decode(engine, prompts, _ANSWER))  # noqa: B023
                for engine in engines
            )
            if attempt >= 0:
                ratios.append(theirs / ours)
        found[batch] = round(median(ratios), 3)
    return found


def _by_slots(device: torch.device) -> dict[int, float]:
    """Measure real rollouts with a long tail and more prompts than slots."""
    spec = load_job_spec(_ROOT / "configs" / "tiny-reasoner.yaml")
    tokenizer = Tokenizer(spec.policy.path)
    table = [row for _, row in islice(read_rows(Path(spec.data.sources[0].path)), _ROLLOUTS // 8)]
    prompts = [tokenizer.prompt_tokens(row["prompt"], spec.data, "train") for row in table]
    requests = [
        request(index * 8 + member, prompt, spec.rollout.max_new_tokens, tokenizer.stop_tokens())
        for index, prompt in enumerate(prompts)
        for member in range(8)
    ]
    seen: dict[int, list[float]] = {slots: [] for slots in _SLOTS}
    for _ in range(_REPETITIONS):
        for slots in _SLOTS:
            engine = _engine(slots, 896, device)
            tokens = 0

            def decode_all(engine: NativeEngine = engine) -> None:
                nonlocal tokens
                engine.submit(requests)
                while engine.running:
                    tokens += sum(len(done.tokens) for done in engine.step())

            seconds = _seconds(device, decode_all)
            seen[slots].append(tokens / seconds)
            engine.close()
    return {slots: round(median(speeds), 1) for slots, speeds in seen.items()}


def _shares(batch: int, device: torch.device) -> dict[str, float]:
    """Profile decoding at a fixed length, with attention as one part."""
    engine = _engine(batch, _PROMPT + 64, device)
    prompts = random_prompts(batch, 0)
    _decode(engine, prompts, 16)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with _recording(_ATTENTION[-1]), profile(activities=activities) as trace:
        _decode(engine, prompts, 64)
    averages = trace.key_averages()
    spent = {event.key: _own_time(event, device) for event in averages}
    whole = sum(spent.values())
    parts = {"matrix_products": _PRODUCTS, "attention": _ATTENTION}
    return {
        name: round(sum(spent.get(op, 0.0) for op in ops) / whole, 3) for name, ops in parts.items()
    }


@contextmanager
def _recording(name: str) -> Generator[None]:
    attended = CompiledWindowAttention.attend

    def recorded(windows: CompiledWindowAttention, layer: int) -> torch.Tensor:
        with record_function(name):
            return attended(windows, layer)

    with patch.object(CompiledWindowAttention, "attend", recorded):
        yield


def _own_time(event: Any, device: torch.device) -> float:
    return event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total


def _engine(slots: int, context: int, device: torch.device) -> NativeEngine:
    decoder = load_decoder(MODEL)
    layers = decoder.config.layers
    return NativeEngine(
        decoder,
        decode_text=lambda tokens: "",
        slots=slots,
        max_context=context,
        device=device,
        version=PolicyVersion(0),
        captured=(2, layers // 2, layers - 3, layers),
    )


def request(
    id: int, prompt: Sequence[int], tokens: int, stops: frozenset[int] = frozenset()
) -> Request:
    key = NoiseKey(seed=1, step=Step(0), purpose="train", prompt=PromptIndex(0), member=Member(id))
    return Request(
        id=id,
        prompt=tuple(prompt),
        key=key,
        sampling=Sampling(),
        max_new_tokens=tokens,
        stop_tokens=stops,
    )


def random_prompts(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(3, 20, (count, _PROMPT), generator=generator).tolist()


def _decode(engine: NativeEngine, prompts: list[list[int]], tokens: int) -> None:
    engine.submit([request(i, prompt, tokens) for i, prompt in enumerate(prompts)])
    while engine.running:
        for done in engine.step():
            assert len(done.tokens) == len(done.logprobs) == tokens


def _generate(model: PreTrainedModel, prompts: list[list[int]]) -> None:
    ids = torch.tensor(prompts, device=model.device)
    with torch.inference_mode():
        out: torch.Tensor = model.generate(  # pyright: ignore
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=_ANSWER,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=True,
        )
    assert out.shape[1] == _PROMPT + _ANSWER


def _seconds(device: torch.device, work: Callable[[], None]) -> float:
    if device.type != "cpu":
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - started
    started = time.process_time()
    work()
    return time.process_time() - started


if __name__ == "__main__":
    main()
