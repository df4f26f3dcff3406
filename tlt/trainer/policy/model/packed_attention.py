"""Attention over one row of many sequences, in Transformers' registry: no token is padding.

A query meets its own sequence up to its own position; any other request of a model is refused,
never ignored. `cu_seq_lens_q` and `max_length_q` say where sequences begin and how long the longest
is, as for Flash Attention. Without them every row is a sequence.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tlt.kernels.training_kernels import attend_per_sequence, load_kernels

# torch's kernel, once for each sequence
PACKED = "tlt_packed"
# our C kernel
NATIVE = "tlt_native"
# a GPU's kernel: flash-attn's where that is installed, or else torch's own; Transformers would
# load a kernel of its own for a name with "flash"
FLASH = "tlt_varlen"

_HARMLESS_OPTIONS = {"dropout", "output_attentions", "position_ids", "use_cache"}


@dataclass(frozen=True)
class _Rows:
    """Say where sequences begin in a row, how long the longest is, and the scores' factor."""

    bounds: Tensor
    longest: int | None
    scale: float


_Attend = Callable[[Tensor, Tensor, Tensor, _Rows], Tensor]


def _attend_by_sequence(query: Tensor, key: Tensor, value: Tensor, rows: _Rows) -> Tensor:
    return attend_per_sequence(query, key, value, rows.bounds, rows.scale)


def _attend_by_flash(query: Tensor, key: Tensor, value: Tensor, rows: _Rows) -> Tensor:
    """Compute in bfloat16: these kernels have no float32."""
    longest = rows.longest or int(rows.bounds.diff().max())
    q, k, v = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
    out = flash_kernel()(q, k, v, rows.bounds.to(torch.int32), longest, rows.scale)
    return out.to(value.dtype)


@cache
def flash_kernel() -> Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]:
    """Return a causal kernel: of query, key, value, bounds, the longest sequence, and a factor."""
    try:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
    except ImportError:
        return _torch_kernel()

    def attend(
        query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float
    ) -> Tensor:
        sizes = bounds, bounds, longest, longest
        return flash_attn_varlen_func(query, key, value, *sizes, softmax_scale=scale, causal=True)

    return attend


def _torch_kernel() -> Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    # before PyTorch 2.12 queries share keys without being asked to
    named = "enable_gqa" in signature(varlen_attn).parameters
    shared: dict[str, Any] = {"enable_gqa": True} if named else {}

    def attend(
        query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float
    ) -> Tensor:
        sizes = bounds, bounds, longest, longest
        out = varlen_attn(query, key, value, *sizes, scale=scale, window_size=(-1, 0), **shared)
        assert isinstance(out, Tensor)
        return out

    return attend


def _attend_natively(query: Tensor, key: Tensor, value: Tensor, rows: _Rows) -> Tensor:
    """Compute in float32: scores in bfloat16 cost more accuracy than all else together."""
    inputs = [tensor.float().contiguous() for tensor in (query, key, value)]
    with torch.autocast("cpu", enabled=False):
        out, _ = _attend(*inputs, rows.bounds, rows.scale)
    return out.to(value.dtype)


# an operator, so that torch.compile looks neither inside nor at the lengths
@torch.library.custom_op("tlt::attend", mutates_args=(), device_types="cpu")
def _attend(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    kernels = load_kernels()
    assert kernels is not None
    return kernels.attend(query, key, value, bounds, scale)


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
    kernels = load_kernels()
    assert kernels is not None
    return kernels.attend_backward(slope.contiguous(), query, key, value, out, lse, bounds, scale)


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


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, bounds, scale = inputs
    ctx.save_for_backward(*tensors, *output, bounds)
    ctx.scale = scale


def _backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_attend_backward(slope, *ctx.saved_tensors, ctx.scale), None, None


_attend.register_autograd(_backward, setup_context=_save_for_backward)


def _adapt(attend: _Attend) -> Callable[..., tuple[Tensor, None]]:
    """Wrap a kernel in the signature that Transformers calls."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Take [rows, heads, tokens, width] and return [rows, tokens, heads, width]."""
        unknown = [n for n, o in options.items() if o is not None and n not in _HARMLESS_OPTIONS]
        if unknown or attention_mask is not None or key.shape[2] != query.shape[2]:
            raise NotImplementedError(f"attention with {', '.join(unknown) or 'a mask'}")
        rows, heads, tokens, width = query.shape
        if cu_seq_lens_q is None:
            bounds = torch.arange(0, rows * tokens + 1, tokens, device=query.device)
            max_length_q = tokens
        else:
            bounds = cu_seq_lens_q.long()
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        scale = width**-0.5 if scaling is None else scaling
        out = attend(q, k, v, _Rows(bounds, max_length_q, scale))
        return out.view(rows, tokens, heads, -1), None

    return attention


@contextmanager
def record_callers(name: str) -> Generator[set[nn.Module]]:
    """Collect the modules that call the attention `name`; some models have one of their own."""
    own = ALL_ATTENTION_FUNCTIONS[name]
    callers: set[nn.Module] = set()

    def recording(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        callers.add(module)
        return own(module, *arguments, **options)

    AttentionInterface.register(name, recording)
    try:
        yield callers
    finally:
        AttentionInterface.register(name, own)


_KERNELS: dict[str, _Attend] = {
    PACKED: cast("_Attend", torch.compiler.disable(_attend_by_sequence)),
    NATIVE: _attend_natively,
    FLASH: _attend_by_flash,
}
# without a mask of that name Transformers makes none, and doesn't ask the device where rows end
for _name, _kernel in _KERNELS.items():
    AttentionInterface.register(_name, _adapt(_kernel))
