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
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Check, Figures, beside, require
from tlt.trainer.policy.model.packed_attention import flash_kernel

# an H200 copies at 4.3 of 4.8 TB/s, and multiplies in bfloat16 at 788 of 989 TFLOP/s: measured
_COPIED, _MULTIPLIED = 0.9, 0.8
_ARGUMENTS = ("scale", "window_size")
_HEADS, _SHARED, _WIDTH, _LENGTHS = 12, 6, 128, (300, 1, 77, 640)
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
    require(not missing, f"torch {torch.__version__}: varlen_attn lacks {', '.join(missing)}")
    return {"torch": str(torch.__version__), "grouped_heads": "enable_gqa" in known}


def _compare_attention(machine: Machine) -> Figures:
    """Let the kernel for packed answers and the plain one attend, forwards and backwards."""
    generator = torch.Generator(machine.device).manual_seed(1)
    total = sum(_LENGTHS)
    shapes = [(total, _HEADS, _WIDTH), *[(total, _HEADS // _SHARED, _WIDTH)] * 2]
    inputs = query, key, value = [
        torch.randn(shape, device=machine.device, generator=generator).bfloat16().requires_grad_()
        for shape in shapes
    ]
    bounds = torch.tensor([0, *_LENGTHS], device=machine.device).cumsum(0).to(torch.int32)
    packed = flash_kernel()(query, key, value, bounds, max(_LENGTHS), _WIDTH**-0.5)
    parts = [
        scaled_dot_product_attention(
            *(x.float().transpose(0, 1)[None] for x in part), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        for part in zip(*(x.split(_LENGTHS) for x in inputs), strict=True)
    ]
    alone = torch.cat(parts)
    found = (packed.float(), *torch.autograd.grad(packed.float().square().sum(), inputs))
    expected = (alone, *torch.autograd.grad(alone.square().sum(), inputs))
    errors = [
        ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()
        for a, b in zip(found, expected, strict=True)
    ]
    require(max(errors) <= _ROUNDING, f"values or gradients are {max(errors):.4f} off")
    return {"largest_error": beside(max(errors), _ROUNDING)}


def _measure(machine: Machine) -> Figures:
    size, side = ((1 << 31), 8192) if machine.has_gpu else ((1 << 26), 512)
    source = torch.empty(size, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    matrix = torch.randn(side, side, device=machine.device).to(machine.dtype)
    small = torch.zeros(1, device=machine.device)
    seconds = machine.seconds_of
    copied = 2 * size / seconds(lambda: target.copy_(source), 5)
    multiplied = 2 * side**3 / seconds(lambda: matrix @ matrix, 5)
    sheet = machine.sheet
    return {
        "copied_bytes_per_second": beside(copied, _COPIED * sheet.bandwidth),
        "flop_per_second": beside(multiplied, _MULTIPLIED * sheet.bfloat16),
        "launch_seconds": beside(seconds(lambda: small.add_(1), 1000), sheet.launch),
    }
