"""Compare the policy trainer with the same model in plain Transformers, on a real step.

`python -m benchmarks.learner --out F.json`. Tokens per second count no padding, over the CPU time
of all minibatches of a rank's share of a step: forward, backward, clipping, optimizer. The
reference is `AutoModelForCausalLM` with SDPA and torch's AdamW, in float32 and under bfloat16
autocast, on padded length buckets. It computes all logits, which cost nothing with a vocabulary of
32, and the same loss. For the claim the trainer gets the same samples in each micro-batch, packed
or padded.

For the whole update the trainer makes its own micro-batches. Later minibatches need old log-probs,
which the reference computes in a forward pass, and so does the trainer in the comparison. By
default it checks an eighth of them and uses the sampler's if they agree; this is less work rather
than the same work done faster, and is reported separately.
"""

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.learner_sides import Ours, Reference, SameBuckets, interleaved
from benchmarks.learner_start import measured_start
from benchmarks.real_step import fixed_lengths, real_step
from benchmarks.result import Claim, write_result
from tlt.spec.config import JobSpec
from tlt.spec.spec_files import load_job_spec
from tlt.trainer.policy.model.logprobs import score_batch
from tlt.trainer.policy.model.micro_batches import Minibatch, build_micro_batches
from tlt.trainer.policy.model.model_loading import load_model
from tlt.trainer.policy.policy_learner import PolicyLearner
from tlt.trainer.policy.speed.attention_choice import set_attention

_ROOT = Path(__file__).resolve().parent.parent
_SPEC = _ROOT / "configs" / "tiny-reasoner.yaml"
_PAIRS = 5
_UPDATES = 3
_FIXED = (128, 256, 512)
_VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32", "compile": False},
    "float32, compiled": {"precision": "float32", "compile": True},
    "bfloat16, compiled": {"precision": "bfloat16", "compile": True},
    "float32, no compiler": {"precision": "float32", "compile": False, "attention": "packed"},
    "bfloat16": {"precision": "bfloat16", "compile": False},
    "float32, padded": {"precision": "float32", "compile": False, "attention": "padded"},
}
# the choice of `auto` on a machine without matrix units, for a job as short as the demo
_OURS = "float32"
_SAME_LENGTHS = ("float32", "float32, compiled", "float32, padded")
_REAL_LENGTHS = (*_SAME_LENGTHS, "bfloat16, compiled", "float32, no compiler")
_COMPUTED = "float32, old log-probs computed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    began = time.monotonic()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    job = load_job_spec(_SPEC)
    start_up = measured_start(job)
    real = real_step(job)
    sets = {"real": real} | {str(length): fixed_lengths(real, length) for length in _FIXED}
    speeds = {
        name: _speeds(job, work, device, _REAL_LENGTHS if name == "real" else _SAME_LENGTHS)
        for name, work in sets.items()
    }
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
        "update_speedup": {
            "like for like": round(updates["reference, float32"] / updates[_COMPUTED], 3),
            "old log-probs the sampler's": round(updates["reference, float32"] / updates[_OURS], 3),
        },
        "start_up_seconds": start_up,
        "recovered_after_steps": recovered,
        "gradient_cosine": cosines,
        "engine_mismatch": _mismatch(job, real, device),
        "profile_share": _profile(job, real[0], device),
    }
    write_result("learner", claims, details, time.monotonic() - began, arguments.out)


def _speeds(
    job: JobSpec, work: list[Minibatch], device: torch.device, names: Iterable[str]
) -> dict[str, float]:
    """Measure both sides without the pass for old log-probs."""
    sides: dict[str, Ours | Reference] = {
        "reference, float32": Reference(job, device, bfloat16=False, old=False),
        "reference, bfloat16": Reference(job, device, bfloat16=True, old=False),
    }
    for name in names:
        sides[name] = Ours(job, device, SameBuckets, **_VARIANTS[name])
    # An update of one minibatch computes no old log-probs.
    seconds = interleaved(sides, [[share] for share in work], device, _PAIRS)
    fed = sum(sample.length - 1 for share in work for sample in share.samples)
    return {name: round(fed / found, 1) for name, found in seconds.items()}


def _updates(job: JobSpec, real: list[Minibatch], device: torch.device) -> dict[str, float]:
    """Measure the seconds of a whole update as a rank computes it."""
    sides: dict[str, Ours | Reference] = {
        "reference, float32": Reference(job, device, bfloat16=False, old=True),
    }
    for name in ("float32", "float32, compiled", "float32, padded"):
        sides[name] = Ours(job, device, PolicyLearner, **_VARIANTS[name])
    sides[_COMPUTED] = Ours(
        job, device, PolicyLearner, **_VARIANTS["float32"], old_logprobs="learner"
    )
    found = interleaved(sides, [real], device, _UPDATES)
    return {name: round(value, 2) for name, value in found.items()}


def _ratio(speeds: dict[str, float]) -> dict[str, float]:
    best = max(speeds["reference, float32"], speeds["reference, bfloat16"])
    return {n: round(s / best, 3) for n, s in speeds.items() if not n.startswith("reference")}


def _cosines(job: JobSpec, share: Minibatch, device: torch.device) -> dict[str, float]:
    """Return cosines of the first minibatch's gradients with that of Transformers in float32."""
    reference = Reference(job, device, bfloat16=False, old=False)
    batches = reference.batches(share)
    reference.backward(share, batches, [None] * len(batches))
    exact = {n: p.grad for n, p in reference.model.named_parameters() if p.grad is not None}
    cosines: dict[str, float] = {}
    for variant, changes in _VARIANTS.items():
        ours = Ours(job, device, PolicyLearner, **changes, gradient_clip=1e9)
        ours.update([share])
        # After one step Adam's first moment is the gradient times a number.
        moments = ours.learner.optimiser_state()
        found = _flat(moments[f"{name}.exp_avg"] for name in exact)
        cosines[variant] = torch.cosine_similarity(found, _flat(exact.values()), dim=0).item()
    return cosines


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def _mismatch(job: JobSpec, real: list[Minibatch], device: torch.device) -> dict[str, Any]:
    """Compare log-probs of sampled tokens of the engine and the trainer at equal weights."""
    found: dict[str, Any] = {}
    for bfloat16 in (False, True):
        model = load_model(job.policy.path, device)
        packed = set_attention(model, job.algorithm, job.policy.max_context, bfloat16)
        gaps: list[Tensor] = []
        for share in real:
            budget = job.algorithm.chosen_microbatch_tokens
            for batch in build_micro_batches(share.samples, budget, device, packed):
                with torch.no_grad():
                    ours, _ = score_batch(model, batch, bfloat16)
                gaps.append((ours - batch.behaviour).abs())
        gap = torch.cat(gaps)
        precision = "bfloat16" if bfloat16 else "float32"
        found[precision] = {"mean": gap.mean().item(), "max": gap.max().item()}
    return found


def _profile(job: JobSpec, share: Minibatch, device: torch.device) -> dict[str, float]:
    """Profile an update."""
    ours = Ours(job, device, PolicyLearner, **_VARIANTS[_OURS])
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


def _breakeven(start_up: dict[str, float], updates: dict[str, float]) -> dict[str, float]:
    """Return the steps after which each part has saved its cost."""
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
