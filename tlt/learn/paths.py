"""Which attention is fast is measured, once per process and shape, never assumed."""

import time
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig

from tlt.learn.attention import BLOCKED, blocked

# A draw goes to the kernel that everybody uses.
_ADVANTAGE = 1.2


def fastest_attention(config: PreTrainedConfig, precision: str, device: torch.device) -> str:
    """The name under which Transformers finds it.

    In float32, and on accelerators, the fused kernel won wherever we measured.
    """
    text = config.get_text_config()
    heads: int | None = getattr(text, "num_attention_heads", None)
    if device.type != "cpu" or precision != "bfloat16" or heads is None:
        return "sdpa"
    shared: int = getattr(text, "num_key_value_heads", None) or heads
    width: int = getattr(text, "head_dim", None) or text.hidden_size // heads
    return _measured(heads, shared, width)


@lru_cache
def _measured(heads: int, shared: int, width: int) -> str:
    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )

    ours = partial(blocked, scale=width**-0.5)
    # about as much work whatever the model's width
    rows = max(1, 512 // (heads * width))
    shapes = ((rows, heads, 256, width), (rows, shared, 256, width), (rows, shared, 256, width))
    inputs = [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    theirs_seconds, ours_seconds = (_seconds(attend, inputs) for attend in (kernel, ours))
    return BLOCKED if ours_seconds * _ADVANTAGE < theirs_seconds else "sdpa"


def _seconds(attend: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    """The best of three, forward and backward, after one to warm up."""

    def once() -> float:
        started = time.perf_counter()
        torch.autograd.grad(attend(*inputs).float().sum(), inputs)
        return time.perf_counter() - started

    once()
    return min(once() for _ in range(3))
