"""Compute how fast each rotary pair rotates, for the same config.json as Transformers does.

Transformers' own functions are not used: for llama3 and yarn they differ in the last bit of some
frequencies, which would change the tokens that a seed draws.
"""

import math

import msgspec
import torch


class PlainRope(msgspec.Struct, frozen=True, kw_only=True):
    theta: float


class LinearRope(msgspec.Struct, frozen=True, kw_only=True):
    theta: float
    factor: float


class Llama3Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Slow down by `factor` the pairs that rotate less than `low` times in the original context."""

    theta: float
    factor: float
    low: float
    high: float
    original_positions: int


class YarnRope(msgspec.Struct, frozen=True, kw_only=True):
    theta: float
    factor: float
    original_positions: int
    fast: float
    slow: float
    truncate: bool
    # scale of both queries and keys, so attention scores grow by its square
    scale: float


Rope = PlainRope | LinearRope | Llama3Rope | YarnRope


def rotary_table(rope: Rope, head_dim: int, positions: int, device: torch.device) -> torch.Tensor:
    """Return the complex numbers to multiply the pairs with: [positions, head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    frequencies = _scale_frequencies(rope, 1.0 / rope.theta**exponents)
    angles = torch.outer(torch.arange(positions, device=device).float(), frequencies)
    length = rope.scale if isinstance(rope, YarnRope) else 1.0
    return torch.polar(torch.full_like(angles, length), angles)


def yarn_scale(factor: float, mscale: float | None, mscale_all: float | None) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)


def _scale_frequencies(rope: Rope, frequencies: torch.Tensor) -> torch.Tensor:
    match rope:
        case PlainRope():
            return frequencies
        case LinearRope():
            return frequencies / rope.factor
        case Llama3Rope():
            rotations = rope.original_positions * frequencies / (2 * math.pi)
            kept = ((rotations - rope.low) / (rope.high - rope.low)).clamp(0, 1)
        case YarnRope():
            kept = 1 - _yarn_ramp(rope, len(frequencies), frequencies.device)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _yarn_ramp(rope: YarnRope, pairs: int, device: torch.device) -> torch.Tensor:
    """Rise from 0 at the pair that rotates `fast` times to 1 at the one with `slow` rotations."""

    def pair(rotations: float) -> float:
        log = math.log(rope.original_positions / (rotations * 2 * math.pi))
        return pairs * log / math.log(rope.theta)

    first, last = pair(rope.fast), pair(rope.slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    # a ramp without length becomes a step
    return ((torch.arange(pairs, device=device) - first) / max(last - first, 0.001)).clamp(0, 1)
