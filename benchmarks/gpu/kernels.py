"""Measure what all else is bounded by, and check the attention of packed answers.

`varlen_attn` gained arguments from one PyTorch to the next. Where it refuses one, the learner would
go on with padding, so that it is asked for here by name.
"""

import inspect
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn.attention.varlen import varlen_attn

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.outcomes import Check, Figures, beside
from tlt.kernels.training_kernels import attend_per_sequence
from tlt.trainer.policy.model.packed_attention import flash_kernel

# an H200 copies at 4.3 of 4.8 TB/s, and multiplies in bfloat16 at 788 of 989 TFLOP/s: measured
_COPIED, _MULTIPLIED = 0.9, 0.8
_ARGUMENTS = ("scale", "window_size")
# heads of queries, keys and values
_HEADS, _WIDTH, _LENGTHS = (12, 2, 2), 128, (300, 1, 77, 640)
# of values and gradients, by their largest: bfloat16 keeps 8 bits, and gradients sum products
_ROUNDING = 2**-5


@contextmanager
def checks(machine: Machine) -> Generator[Mapping[str, Check]]:
    yield {
        "varlen_attn takes what we pass": _check_arguments,
        "copy, product, launch": partial(_measure, machine),
        **({"packed attention": partial(_compare_attention, machine)} if machine.has_gpu else {}),
    }


def _check_arguments() -> Figures:
    known = inspect.signature(varlen_attn).parameters
    missing = [name for name in _ARGUMENTS if name not in known]
    assert not missing, f"torch {torch.__version__}: varlen_attn lacks {', '.join(missing)}"
    return {"torch": str(torch.__version__), "grouped_heads": "enable_gqa" in known}


def _compare_attention(machine: Machine) -> Figures:
    """Let the kernel for packed answers and the plain one attend, forwards and backwards."""
    inputs = query, key, value = [
        torch.randn(sum(_LENGTHS), heads, _WIDTH, device=machine.device).bfloat16().requires_grad_()
        for heads in _HEADS
    ]
    bounds, scale = torch.tensor([0, *_LENGTHS], device=machine.device).cumsum(0), _WIDTH**-0.5
    packed = flash_kernel()(query, key, value, bounds.int(), max(_LENGTHS), scale).float()
    alone = attend_per_sequence(query.float(), key.float(), value.float(), bounds, scale)
    found, expected = (
        (states, *torch.autograd.grad(states.square().sum(), inputs)) for states in (packed, alone)
    )
    error = max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)
    )
    assert error <= _ROUNDING, f"values or gradients are {error:.4f} off"
    return {"largest_error": beside(error, _ROUNDING)}


def _measure(machine: Machine) -> Figures:
    side, sheet, seconds = 8192 if machine.has_gpu else 1024, machine.sheet, machine.seconds_of
    matrix = torch.randn(side, side, device=machine.device).to(machine.dtype)
    large = matrix.repeat(16, 1)
    target, small = torch.empty_like(large), matrix[0, :1]
    copied = 2 * large.nbytes / seconds(lambda: target.copy_(large), 5)
    multiplied = 2 * side**3 / seconds(lambda: matrix @ matrix, 5)
    return {
        "copied_bytes_per_second": beside(copied, _COPIED * sheet.bandwidth),
        "flop_per_second": beside(multiplied, _MULTIPLIED * sheet.bfloat16),
        "launch_seconds": beside(seconds(lambda: small.add_(1), 1000), sheet.launch),
    }
