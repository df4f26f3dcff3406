"""How fast each rotary pair turns, as Transformers computes it for the same config.json."""

import math

import msgspec
import torch


class PlainRope(msgspec.Struct, frozen=True, kw_only=True):
    theta: float


class LinearRope(msgspec.Struct, frozen=True, kw_only=True):
    theta: float
    factor: float


class Llama3Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs that turn less than `low` times within the original context are slowed by `factor`."""

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
    # of queries and keys both, so attention scores grow by its square
    scale: float


Rope = PlainRope | LinearRope | Llama3Rope | YarnRope


def rotary_table(rope: Rope, head_dim: int, positions: int, device: torch.device) -> torch.Tensor:
    """[positions, head_dim / 2] complex numbers to multiply the pairs with."""
    exponents = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    frequencies = _scaled(rope, 1.0 / rope.theta**exponents)
    angles = torch.outer(torch.arange(positions, device=device).float(), frequencies)
    length = rope.scale if isinstance(rope, YarnRope) else 1.0
    return torch.polar(torch.full_like(angles, length), angles)


def yarn_scale(factor: float, mscale: float | None, mscale_all: float | None) -> float:
    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return grown(mscale) / grown(mscale_all) if mscale and mscale_all else grown(1.0)


def _scaled(rope: Rope, frequencies: torch.Tensor) -> torch.Tensor:
    match rope:
        case PlainRope():
            return frequencies
        case LinearRope():
            return frequencies / rope.factor
        case Llama3Rope():
            turns = rope.original_positions * frequencies / (2 * math.pi)
            kept = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
            return frequencies * (kept + (1 - kept) / rope.factor)
        case YarnRope():
            kept = 1 - _ramp(rope, len(frequencies), frequencies.device)
            return frequencies * (kept + (1 - kept) / rope.factor)


def _ramp(rope: YarnRope, pairs: int, device: torch.device) -> torch.Tensor:
    """From 0 at the first pair that turns no more than `fast` times to 1 at `slow` times."""

    def pair(turns: float) -> float:
        return (
            pairs * math.log(rope.original_positions / (turns * 2 * math.pi)) / math.log(rope.theta)
        )

    first, last = pair(rope.fast), pair(rope.slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    # a ramp without length is a step
    return ((torch.arange(pairs, device=device) - first) / max(last - first, 0.001)).clamp(0, 1)
