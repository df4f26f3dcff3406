"""The learner against the same Transformers model as it comes, on a rank's share of a real step.

`python -m benchmarks.learner --out F.json`. Tokens per second are those that are fed and no
padding, over the CPU time of all minibatches of a step: forward, backward, clipping, optimiser.
The reference is `AutoModelForCausalLM` with SDPA and torch's AdamW, in float32 and under bfloat16
autocast, on padded length buckets; it computes all logits, which cost nothing with a vocabulary of
32, and takes the same loss of them. For the claim the learner gets the same buckets; for the whole
update it makes its own micro-batches, and both look up the old log-probs of later minibatches.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.result import Claim, write_result
from examples.tiny_reasoner.task import reward
from tlt.config import AlgorithmSpec, JobSpec, load_job_spec
from tlt.engine.base import NoiseKey, Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.learn import paths
from tlt.learn.batching import Microbatch, buckets, microbatches, pack, pad
from tlt.learn.compiled import compile_layers
from tlt.learn.kernels import kernels
from tlt.learn.loading import head, load_model, states
from tlt.learn.losses import objective
from tlt.learn.policy import PolicyLearner
from tlt.learn.sample import LearnSample, Minibatch
from tlt.learn.scores import score
from tlt.models.folder import load_decoder
from tlt.models.tokenizer import Tokenizer
from tlt.policies.advantage import group_advantages
from tlt.policies.sharding import Sample, shares
from tlt.types import Member, PolicyVersion, PromptIndex, Step

_ROOT = Path(__file__).resolve().parent.parent
_SPEC = _ROOT / "configs" / "tiny-reasoner.yaml"
_PAIRS = 5
_UPDATES = 3
_RANKS = 2
_FIXED = (128, 256, 512)
_VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32", "compile": False},
    "float32, compiled": {"precision": "float32", "compile": True},
    "bfloat16, compiled": {"precision": "bfloat16", "compile": True},
    "float32, no compiler": {"precision": "float32", "compile": False, "attention": "packed"},
    "bfloat16": {"precision": "bfloat16", "compile": False},
    "float32, padded": {"precision": "float32", "compile": False, "attention": "padded"},
}
# what `auto` comes to on a machine without matrix units, for a job as short as the demo
_OURS = "float32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    began = time.monotonic()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    job = load_job_spec(_SPEC)
    start_up = _start_up(job)
    real = _real_step(job)
    sets = {"real": real} | {str(length): _fixed(real, length) for length in _FIXED}
    speeds = {name: _speeds(job, work, device, name == "real") for name, work in sets.items()}
    updates = _updates(job, real, device)
    cosines = _cosines(job, real[0], device)
    ratios = {name: _ratio(found) for name, found in speeds.items()}
    recovered = _breakeven(start_up, updates)
    claims = [
        Claim(name="learner.speedup.real_lengths", value=ratios["real"][_OURS], unit="x", bar=1.5),
        Claim(name="learner.gradient.cosine", value=cosines[_OURS], unit="", bar=0.999),
        Claim(
            name="learner.start_up.recovered",
            value=recovered["kernels and measuring"],
            unit="steps",
            bar=job.algorithm.steps,
            less_is_better=True,
        ),
    ]
    details = {
        "lengths": sorted(len(s.completion) for share in real for s in share.samples),
        "tokens_per_second": speeds,
        "speedup": ratios,
        "update_seconds": updates,
        "start_up_seconds": start_up,
        "recovered_after_steps": recovered,
        "gradient_cosine": cosines,
        "engine_mismatch": _mismatch(job, real, device),
        "profile_share": _profile(job, real[0], device),
    }
    write_result("learner", claims, details, time.monotonic() - began, arguments.out)


def _real_step(job: JobSpec) -> list[Minibatch]:
    """The first rank's share of the demo's first step; groups that agree are left out, as ever."""
    tokenizer = Tokenizer(job.policy.path)
    algorithm = job.algorithm
    lines = Path(job.data.train).read_text().splitlines()[: algorithm.prompts_per_step]
    rows: list[dict[str, str]] = [json.loads(line) for line in lines]
    requests = [
        Request(
            id=prompt * algorithm.group_size + member,
            prompt=tokenizer.prompt_tokens(row["prompt"], job.data, ""),
            key=NoiseKey(
                seed=job.seed,
                step=Step(0),
                purpose="train",
                prompt=PromptIndex(prompt),
                member=Member(member),
            ),
            sampling=Sampling(),
            max_new_tokens=job.rollout.max_new_tokens,
            stop_tokens=tokenizer.stop_tokens(),
        )
        for prompt, row in enumerate(rows)
        for member in range(algorithm.group_size)
    ]
    engine = NativeEngine(
        load_decoder(Path(job.policy.path), torch.float32),
        decode_text=tokenizer.decode,
        slots=job.rollout.slots,
        max_context=job.policy.max_context or 0,
        device=torch.device("cpu"),
        version=PolicyVersion(0),
    )
    engine.submit(requests)
    done = {answer.id: answer for _ in iter(lambda: engine.running, 0) for answer in engine.step()}
    engine.close()
    samples: list[Sample] = []
    for prompt, row in enumerate(rows):
        members = range(prompt * algorithm.group_size, (prompt + 1) * algorithm.group_size)
        rewards = [reward(done[id_].text, row["answer"]) for id_ in members]
        advantages = group_advantages(rewards, algorithm.normalise_advantage) or []
        samples += [
            Sample(PromptIndex(prompt), Member(i), advantage, len(done[id_].tokens))
            for i, (id_, advantage) in enumerate(zip(members, advantages, strict=False))
        ]
    (first, *_) = shares(samples, [1] * _RANKS, algorithm.minibatches, job.seed, 0)

    def learned(prompt: int, member: int, advantage: float) -> LearnSample:
        answer = done[prompt * algorithm.group_size + member]
        return LearnSample(
            prompt=requests[answer.id].prompt,
            completion=tuple(answer.tokens),
            logprobs=tuple(answer.logprobs),
            temperature=1.0,
            advantage=advantage,
        )

    return [
        Minibatch(
            samples=[learned(ref.prompt, ref.member, ref.advantage) for ref in share.ranks[0]],
            total_tokens=share.total_tokens,
            total_sequences=share.total_sequences,
        )
        for share in first
    ]


def _fixed(real: Sequence[Minibatch], length: int) -> list[Minibatch]:
    """4096 tokens in answers of one length, cut from real ones that are strung together."""
    tokens = [token for share in real for sample in share.samples for token in sample.completion]
    samples = [
        LearnSample(
            prompt=tokens[start : start + length // 8],
            completion=tokens[start + length // 8 : start + length + 1],
            logprobs=(-1.0,) * (length + 1 - length // 8),
            temperature=1.0,
            advantage=1.0 if start % (2 * length) else -1.0,
        )
        for start in range(0, 4096, length)
    ]
    scored = sum(len(sample.completion) for sample in samples)
    return [Minibatch(samples=samples, total_tokens=scored, total_sequences=len(samples))]


class _SameBuckets(PolicyLearner):
    """Micro-batches of the same samples as the reference's."""

    def _microbatches(self, share: Minibatch) -> list[Microbatch]:
        form = pack if self._packed else pad
        chosen = buckets(share.samples, self._spec.microbatch_tokens)
        return [form(bucket, self._device) for bucket in chosen]


class _Ours:
    def __init__(
        self, job: JobSpec, device: torch.device, kind: type[PolicyLearner], **changes: Any
    ) -> None:
        spec = _algorithm(job, **changes)
        self.learner = kind(job.policy.path, spec, job.policy.max_context, device)
        self._start = {name: w.clone() for name, w in self.learner.weights().items()}
        self._optimiser = {"step": torch.tensor(0)}

    def update(self, work: Sequence[Minibatch]) -> None:
        self.learner.update(0, work, None, lambda: None)

    def reset(self) -> None:
        self.learner.load_weights(self._start)
        self.learner.load_optimiser_state(self._optimiser)


class _Reference:
    def __init__(self, job: JobSpec, device: torch.device, bfloat16: bool, old: bool) -> None:
        self._spec = job.algorithm
        self._device, self._bfloat16, self._old = device, bfloat16, old
        self.model = _transformers(job, device)
        self._start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.reset()

    def update(self, work: Sequence[Minibatch]) -> None:
        batches = [self.batches(share) for share in work]
        old: list[list[Tensor | None]] = [[None] * len(share) for share in batches]
        if self._old:
            with torch.no_grad():
                for index, share in enumerate(batches[1:], start=1):
                    old[index] = [self._logprobs(batch) for batch in share]
        for index, share in enumerate(work):
            self._optimiser.zero_grad()
            self.backward(share, batches[index], old[index])
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._spec.gradient_clip)
            self._optimiser.step()

    def batches(self, share: Minibatch) -> list[Microbatch]:
        return microbatches(share.samples, self._spec.microbatch_tokens, self._device, packed=False)

    def backward(
        self, share: Minibatch, batches: list[Microbatch], old: Sequence[Tensor | None]
    ) -> None:
        for batch, before in zip(batches, old, strict=True):
            current = self._logprobs(batch)
            known = current.detach() if before is None else before
            loss, _ = objective(self._spec, batch, share, current, known, None)
            loss.backward()

    def reset(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self._start[name])
        self._optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=self._spec.learning_rate, betas=self._spec.betas
        )

    def _logprobs(self, batch: Microbatch) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16):
            logits = self.model(input_ids=batch.tokens, use_cache=False).logits
        chosen = logits.flatten(0, 1)[batch.positions].float() / batch.temperature[:, None]
        return chosen.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]


def _algorithm(job: JobSpec, **changes: Any) -> AlgorithmSpec:
    return msgspec.structs.replace(job.algorithm, **changes)


def _transformers(job: JobSpec, device: torch.device) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(
        job.policy.path, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.to(device).eval()


def _speeds(
    job: JobSpec, work: list[Minibatch], device: torch.device, everything: bool
) -> dict[str, float]:
    """Without the pass for old log-probs, on either side."""
    names = list(_VARIANTS)[: 4 if everything else 2]
    sides: dict[str, _Ours | _Reference] = {
        "reference, float32": _Reference(job, device, bfloat16=False, old=False),
        "reference, bfloat16": _Reference(job, device, bfloat16=True, old=False),
    }
    for name in names:
        sides[name] = _Ours(job, device, _SameBuckets, **_VARIANTS[name])
    # An update of one minibatch computes no old log-probs.
    seconds = _interleaved(sides, [[share] for share in work], device, _PAIRS)
    fed = sum(sample.length - 1 for share in work for sample in share.samples)
    return {name: round(fed / found, 1) for name, found in seconds.items()}


def _updates(job: JobSpec, real: list[Minibatch], device: torch.device) -> dict[str, float]:
    """Seconds of a whole update, as a rank computes it."""
    sides: dict[str, _Ours | _Reference] = {
        "reference, float32": _Reference(job, device, bfloat16=False, old=True),
    }
    for name in ("float32", "float32, compiled", "float32, padded"):
        sides[name] = _Ours(job, device, PolicyLearner, **_VARIANTS[name])
    sides["float32, old log-probs computed"] = _Ours(
        job, device, PolicyLearner, **_VARIANTS["float32"], old_logprobs="learner"
    )
    found = _interleaved(sides, [real], device, _UPDATES)
    return {name: round(value, 2) for name, value in found.items()}


def _interleaved(
    sides: Mapping[str, "_Ours | _Reference"],
    work: list[list[Minibatch]],
    device: torch.device,
    rounds: int,
) -> dict[str, float]:
    """Medians of the seconds for all updates in `work`; a round before them only warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(rounds + 1):
        for name, side in sides.items():
            side.reset()
            began = _clock(device)
            for update in work:
                side.update(update)
            if pair > 0:
                seconds[name].append(_clock(device) - began)
    return {name: statistics.median(found) for name, found in seconds.items()}


def _clock(device: torch.device) -> float:
    """On a CPU the time of this process alone, because others may share its core."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def _ratio(speeds: dict[str, float]) -> dict[str, float]:
    best = max(speeds["reference, float32"], speeds["reference, bfloat16"])
    return {n: round(s / best, 3) for n, s in speeds.items() if not n.startswith("reference")}


def _cosines(job: JobSpec, share: Minibatch, device: torch.device) -> dict[str, float]:
    """Of the first minibatch's gradient, with the one of Transformers in float32."""
    reference = _Reference(job, device, bfloat16=False, old=False)
    batches = reference.batches(share)
    reference.backward(share, batches, [None] * len(batches))
    exact = {n: p.grad for n, p in reference.model.named_parameters() if p.grad is not None}
    cosines: dict[str, float] = {}
    for variant, changes in _VARIANTS.items():
        ours = _Ours(job, device, PolicyLearner, **changes, gradient_clip=1e9)
        ours.update([share])
        # After one step Adam's first moment is the gradient times a number.
        moments = ours.learner.optimiser_state()
        found = _flat(moments[f"{name}.exp_avg"] for name in exact)
        cosines[variant] = torch.cosine_similarity(found, _flat(exact.values()), dim=0).item()
    return cosines


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def _mismatch(job: JobSpec, real: list[Minibatch], device: torch.device) -> dict[str, Any]:
    """Log-probs of sampled tokens: the engine's against the learner's, same weights."""
    found: dict[str, Any] = {}
    for precision in ("float32", "bfloat16"):
        model = load_model(job.policy.path, device)
        spec = _algorithm(job, precision=precision)
        packed = paths.set_attention(model, spec, job.policy.max_context)
        gaps: list[Tensor] = []
        for share in real:
            for batch in microbatches(share.samples, spec.microbatch_tokens, device, packed):
                with torch.no_grad():
                    with torch.autocast(
                        device.type, torch.bfloat16, enabled=precision == "bfloat16"
                    ):
                        hidden = states(model, batch.tokens, batch.bounds)
                    chosen = hidden.flatten(0, 1)[batch.positions]
                    ours, _ = score(chosen, head(model), batch.targets, batch.temperature)
                gaps.append((ours - batch.behaviour).abs())
        gap = torch.cat(gaps)
        found[precision] = {"mean": gap.mean().item(), "max": gap.max().item()}
    return found


def _profile(job: JobSpec, share: Minibatch, device: torch.device) -> dict[str, float]:
    """Where the time of an update goes."""
    ours = _Ours(job, device, PolicyLearner, **_VARIANTS[_OURS])
    ours.update([share])
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        ours.update([share])
    times = {event.key: event.self_cpu_time_total for event in seen.key_averages()}
    total = sum(times.values())
    products = sum(times.get(f"aten::{name}", 0) for name in ("mm", "addmm", "bmm", "baddbmm"))
    attention = sum(t for name, t in times.items() if "tlt" in name)
    return {
        "matrix products": round(products / total, 3),
        "attention": round(attention / total, 3),
        "all else": round(1 - (products + attention) / total, 3),
    }


def _start_up(job: JobSpec) -> dict[str, float]:
    """Wall seconds, the compiler's with an empty cache and with a full one, in fresh processes."""
    began = time.monotonic()
    kernels()
    built = time.monotonic()
    model = load_model(job.policy.path, torch.device("cpu"))
    loaded = time.monotonic()
    paths.set_attention(model, job.algorithm, job.policy.max_context)
    measured = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tlt-bench-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        cold, warm = (_alone(_compile_seconds, job) for _ in range(2))
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    return {
        "building the kernels": round(built - began, 2),
        "measuring the paths": round(measured - loaded, 2),
        "compiling the layers, cold": round(cold, 1),
        "compiling the layers, warm": round(warm, 1),
    }


def _alone(function: Callable[[JobSpec], float], job: JobSpec) -> float:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, job).result()


def _compile_seconds(job: JobSpec) -> float:
    torch.set_num_threads(1)
    model = load_model(job.policy.path, torch.device("cpu"))
    packed = paths.set_attention(model, job.algorithm, job.policy.max_context)
    sample = LearnSample(
        prompt=(1,), completion=(2,) * 300, logprobs=(-1.0,) * 300, temperature=1.0, advantage=1.0
    )
    batch, *_ = microbatches([sample] * 3, 4096, torch.device("cpu"), packed)
    began = time.monotonic()
    compile_layers(model, batch, bfloat16=False, forced=True)
    return time.monotonic() - began


def _breakeven(start_up: dict[str, float], updates: dict[str, float]) -> dict[str, float]:
    """Steps after which each part has saved what it cost."""
    by_kernels = updates["float32, padded"] - updates["float32"]
    by_compiling = updates["float32"] - updates["float32, compiled"]
    kernels_cost = start_up["building the kernels"] + start_up["measuring the paths"]

    def steps(cost: float, saved: float) -> float:
        return round(cost / saved, 2) if saved > 0 else float("inf")

    return {
        "kernels and measuring": steps(kernels_cost, by_kernels),
        "compiling, cold": steps(start_up["compiling the layers, cold"], by_compiling),
        "compiling, warm": steps(start_up["compiling the layers, warm"], by_compiling),
    }


if __name__ == "__main__":
    main()
