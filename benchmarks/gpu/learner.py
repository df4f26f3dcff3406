"""Check policy updates against the CPU's in float64, and their memory against the plan."""

import math
import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from benchmarks.gpu.parts import Check, Figures, Machine, require
from benchmarks.random_policy import HALF_BILLION, THREE_BILLION, Sizes, write_policy
from tests.live_tensor_bytes import LiveTensorBytes
from tlt.memory_plan import JobMemory, Spread
from tlt.memory_plan.learner_memory import learner_items
from tlt.memory_plan.memory_items import peak_bytes
from tlt.models.config_json import read_config
from tlt.protocol.shared_values import UpdateMetrics
from tlt.ranks.job_sizes_from_spec import policy_shape
from tlt.spec.config import AlgorithmSpec
from tlt.trainer.policy.model.micro_batches import Minibatch, PolicySample
from tlt.trainer.policy.policy_learner import PolicyLearner

_CPU = torch.device("cpu")
_TINY = Sizes(64, 256, 4, 4, 2, vocabulary=600)
_NARROW = Sizes(128, 512, 6, 4, 2, vocabulary=1000)
_ANSWERS, _TOKENS, _PROMPT = 8, 200, 20
# relative errors of a gradient's norm: TF32's and bfloat16's rounding, over many sums
_FLOAT32, _BFLOAT16 = 1e-2, 5e-2
_PLANNED = 0.10


@contextmanager
def checks(machine: Machine) -> Generator[Mapping[str, Check]]:
    first, second = (HALF_BILLION, THREE_BILLION) if machine.has_gpu else (_TINY, _NARROW)
    tokens = (4096, 2048) if machine.has_gpu else (1024, 1024)
    small, first_folder, second_folder = (machine.folder / name for name in ("0", "1", "2"))
    write_policy(small, _TINY)
    write_policy(first_folder, first)
    yield {
        "float32 as on a CPU": partial(_compare, machine, small, "float32", _FLOAT32),
        "bfloat16 as on a CPU": partial(_compare, machine, small, "bfloat16", _BFLOAT16),
        "packed answers as on a CPU": partial(
            _compare,
            machine,
            small,
            "bfloat16",
            _BFLOAT16,
            "flash" if machine.has_gpu else "packed",
        ),
        "memory and speed": partial(_measure, machine, first_folder, tokens[0], False),
        "memory with checkpointing": partial(
            _write_and_measure, machine, second_folder, second, tokens[1]
        ),
    }


def _compare(
    machine: Machine,
    folder: Path,
    precision: Literal["float32", "bfloat16"],
    error: float,
    attention: Literal["padded", "packed", "flash"] = "padded",
) -> Figures:
    reference = _update(folder, _spec("float32"), _CPU, torch.float64)
    spec = _spec(precision, attention=attention)
    found = _update(folder, spec, machine.device, torch.float32)
    norm = abs(found.gradient_norm / reference.gradient_norm - 1)
    require(math.isfinite(found.loss), f"the loss is {found.loss}")
    require(norm <= error, f"the gradient's norm is {norm:.2%} off")
    return {"norm_off": norm, "loss_off": abs(found.loss - reference.loss)}


def _update(
    folder: Path, spec: AlgorithmSpec, device: torch.device, dtype: torch.dtype
) -> UpdateMetrics:
    learner = PolicyLearner(str(folder), spec, None, device, dtype=dtype)
    return learner.update(0, [_minibatch(_ANSWERS, _TOKENS)], None, _nothing)


def _write_and_measure(machine: Machine, folder: Path, sizes: Sizes, tokens: int) -> Figures:
    write_policy(folder, sizes)
    return _measure(machine, folder, tokens, True)


def _measure(machine: Machine, folder: Path, tokens: int, checkpointing: bool) -> Figures:
    """Measure the second of two updates; each has two micro-batches of `tokens` tokens."""
    spec = _spec(
        "bfloat16" if machine.has_gpu else "float32",
        tokens=tokens,
        gradient_checkpointing=checkpointing,
    )
    answers, length = 8, tokens // 4
    minibatch = _minibatch(answers, length - _PROMPT + 1)
    device = machine.device
    live = LiveTensorBytes()
    if machine.has_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        learner = PolicyLearner(str(folder), spec, None, device)
        learner.update(0, [minibatch], None, _nothing)
        began = machine.now()
        learner.update(1, [minibatch], None, _nothing)
    else:
        with live:
            learner = PolicyLearner(str(folder), spec, None, device)
            learner.update(0, [minibatch], None, _nothing)
            live.restart()
            began = machine.now()
            learner.update(1, [minibatch], None, _nothing)
    took = machine.now() - began
    peak = torch.cuda.max_memory_allocated(device) if machine.has_gpu else live.peak
    planned = _planned(folder, spec, length + 1, answers, machine)
    figures = {
        "tokens_per_second": round(2 * tokens / took),
        "peak_bytes": peak,
        "planned_bytes": planned,
    }
    require(abs(planned / peak - 1) <= _PLANNED, f"the plan is {planned / peak - 1:+.1%} off")
    return figures


def _planned(
    folder: Path, spec: AlgorithmSpec, context: int, answers: int, machine: Machine
) -> int:
    job = JobMemory(
        policy=policy_shape(read_config(folder)),
        engine="native",
        engine_width=4,
        slots=1,
        max_context=context,
        microbatch_tokens=spec.chosen_microbatch_tokens,
        gradient_checkpointing=spec.gradient_checkpointing is True,
        bfloat16=spec.precision == "bfloat16",
        answers=answers,
        scored=answers // 2 * (context - _PROMPT),
    )
    device: Literal["cuda", "cpu"] = "cuda" if machine.has_gpu else "cpu"
    return peak_bytes(tuple(learner_items(job, Spread(device=device))))


def _spec(
    precision: Literal["float32", "bfloat16"],
    tokens: int = 512,
    gradient_checkpointing: bool = False,
    attention: Literal["padded", "packed", "flash"] = "padded",
) -> AlgorithmSpec:
    return AlgorithmSpec(
        steps=2,
        prompts_per_step=2,
        group_size=2,
        microbatch_tokens=tokens,
        attention=attention,
        precision=precision,
        gradient_checkpointing=gradient_checkpointing,
        compile=False,
    )


def _minibatch(answers: int, length: int) -> Minibatch:
    dice = random.Random(length)
    samples = [
        PolicySample(
            prompt=tuple(dice.randrange(500) for _ in range(_PROMPT)),
            completion=tuple(dice.randrange(500) for _ in range(length)),
            logprobs=(-6.0,) * length,
            temperature=1.0,
            advantage=1.0 if index % 2 else -1.0,
        )
        for index in range(answers)
    ]
    return Minibatch(samples=samples, total_tokens=answers * length, total_sequences=answers)


def _nothing() -> None:
    """Do nothing between micro-batches."""
