"""Attention over one row of many sequences, in Transformers' registry: no token is padding.

A query meets its own sequence up to its own position, and what a model asks for beyond that is
refused, never ignored. `cu_seq_lens_q` says where sequences begin, as for Flash Attention; without
it every row is a sequence.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tlt.kernels.training_kernels import load_kernels, one_by_one

# torch's kernel, once for each sequence
PACKED = "tlt_packed"
# ours, which has to be built
NATIVE = "tlt_native"

_HARMLESS = {"dropout", "output_attentions", "position_ids", "use_cache"}
_Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def _native(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float) -> Tensor:
    """In float32 whatever comes in: bfloat16 scores cost more accuracy than all else together."""
    inputs = [tensor.float().contiguous() for tensor in (query, key, value)]
    with torch.autocast("cpu", enabled=False):
        out, _ = _attend(*inputs, bounds, scale)
    return out.to(value.dtype)


# An operator of its own, so that torch.compile looks neither inside nor at the lengths.
@torch.library.custom_op("tlt::attend", mutates_args=(), device_types="cpu")
def _attend(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    found = load_kernels()
    assert found is not None
    return found.attend(query, key, value, bounds, scale)


@torch.library.custom_op("tlt::attend_backward", mutates_args=(), device_types="cpu")
def _attend_backward(
    slope: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    found = load_kernels()
    assert found is not None
    return found.attend_backward(slope.contiguous(), query, key, value, out, lse, bounds, scale)


@_attend.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:2])


@_attend_backward.register_fake
def _(
    slope: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, bounds, scale = inputs
    ctx.save_for_backward(*tensors, *output, bounds)
    ctx.scale = scale


def _way_back(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_attend_backward(slope, *ctx.saved_tensors, ctx.scale), None, None


_attend.register_autograd(_way_back, setup_context=_keep)


def _registered(attend: _Attend) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Transformers' tensors are rows x heads x tokens x width; the result isn't."""
        strange = [n for n, o in options.items() if o is not None and n not in _HARMLESS]
        if strange or attention_mask is not None or key.shape[2] != query.shape[2]:
            raise NotImplementedError(f"attention with {', '.join(strange) or 'a mask'}")
        rows, heads, tokens, width = query.shape
        if cu_seq_lens_q is None:
            bounds = torch.arange(0, rows * tokens + 1, tokens, device=query.device)
        else:
            bounds = cu_seq_lens_q.long()
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        out = attend(q, k, v, bounds, width**-0.5 if scaling is None else scaling)
        return out.view(rows, tokens, heads, -1), None

    return attention


@contextmanager
def watched(name: str) -> Generator[set[nn.Module]]:
    """The modules that meanwhile call the attention `name`; some models have one of their own."""
    own = ALL_ATTENTION_FUNCTIONS[name]
    callers: set[nn.Module] = set()

    def watching(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        callers.add(module)
        return own(module, *arguments, **options)

    AttentionInterface.register(name, watching)
    try:
        yield callers
    finally:
        AttentionInterface.register(name, own)


def _no_mask(*_: Any, **__: Any) -> None:
    """`bounds` says it all."""


_eager = cast("_Attend", torch.compiler.disable(one_by_one))
for _name, _kernel in ((PACKED, _eager), (NATIVE, _native)):
    AttentionInterface.register(_name, _registered(_kernel))
    AttentionMaskInterface.register(_name, _no_mask)
