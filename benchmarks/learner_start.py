"""Measure a rank's start before its first update, in wall seconds."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch

from tlt.kernels.training_kernels import load_kernels
from tlt.spec.config import JobSpec
from tlt.trainer.policy.model.micro_batches import PolicySample, build_micro_batches
from tlt.trainer.policy.model.model_loading import load_model
from tlt.trainer.policy.speed.attention_choice import set_attention
from tlt.trainer.policy.speed.compile_layers import compile_layers


def measured_start(job: JobSpec) -> dict[str, float]:
    """Measure fresh processes; the compiler with an empty and with a full cache."""
    began = time.monotonic()
    load_kernels()
    built = time.monotonic()
    model = load_model(job.policy.path, torch.device("cpu"))
    loaded = time.monotonic()
    set_attention(model, job.algorithm, job.policy.max_context, bfloat16=False)
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
    packed = set_attention(model, job.algorithm, job.policy.max_context, bfloat16=False)
    sample = PolicySample(
        prompt=(1,), completion=(2,) * 300, logprobs=(-1.0,) * 300, temperature=1.0, advantage=1.0
    )
    batch, *_ = build_micro_batches([sample] * 3, 4096, torch.device("cpu"), packed)
    began = time.monotonic()
    compile_layers(model, batch, bfloat16=False, forced=True)
    return time.monotonic() - began
