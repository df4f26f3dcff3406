"""Causal attention in C, built where there is a compiler and kept for the life of the process.

Building takes half a second, so nothing is cached on disk: a cache would have to know the machine.
The kernel is used only after it agreed with torch's own, in both directions.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import structlog
import torch
from torch import Tensor
from torch.nn import functional

_log = structlog.get_logger("learn")
_SOURCE = Path(__file__).with_name("attention.c")
_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")


class Kernel:
    """Tensors are float32 and contiguous: tokens x heads x width; `bounds` is int64."""

    def __init__(self, library: ctypes.CDLL) -> None:
        sizes = (*(ctypes.c_long,) * 4, ctypes.c_float)
        self._attend = library.attend
        self._attend.argtypes = (*(ctypes.c_void_p,) * 6, *sizes)
        self._backward = library.attend_backward
        self._backward.argtypes = (*(ctypes.c_void_p,) * 10, *sizes)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The result, and what the way back needs of it."""
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:2])
        tensors = (query, key, value, out, lse, bounds)
        self._call(self._attend, tensors, query, key, bounds, scale)
        return out, lse

    def backward(
        self,
        slope: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        bounds: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        slopes = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        tensors = (slope, query, key, value, out, lse, *slopes, bounds)
        self._call(self._backward, tensors, query, key, bounds, scale)
        return slopes

    def _call(
        self,
        function: "ctypes._NamedFuncPointer",  # pyright: ignore[reportPrivateUsage]
        tensors: tuple[Tensor, ...],
        query: Tensor,
        key: Tensor,
        bounds: Tensor,
        scale: float,
    ) -> None:
        _, heads, width = query.shape
        pointers = [tensor.data_ptr() for tensor in tensors]
        if function(*pointers, len(bounds) - 1, heads, key.shape[1], width, scale):
            raise MemoryError("no memory for the attention's scratch")


@cache
def kernel() -> Kernel | None:
    """None, and one line in the log, where it cannot be had."""
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or "gcc"]
    with tempfile.TemporaryDirectory(prefix="tlt-") as folder:
        library = f"{folder}/attention.so"
        command = [*compiler, *_FLAGS, "-o", library, str(_SOURCE), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
            built = Kernel(ctypes.CDLL(library))
        except subprocess.CalledProcessError as error:
            first, *_ = str(error.stderr).splitlines() or [""]
            _log.warning("attention is not compiled", compiler=compiler[0], error=first)
            return None
        except OSError as error:
            _log.warning("attention is not compiled", compiler=compiler[0], error=str(error))
            return None
    if not _agrees(built):
        _log.warning("compiled attention is wrong here", compiler=compiler[0])
        return None
    return built


def _agrees(built: Kernel) -> bool:
    dice = torch.Generator().manual_seed(0)
    bounds, scale = torch.tensor([0, 3, 73]), 0.3
    query, slope = (torch.randn(73, 4, 40, generator=dice) for _ in range(2))
    key, value = (torch.randn(73, 2, 40, generator=dice) for _ in range(2))
    out, lse = built.attend(query, key, value, bounds, scale)
    ours = (out, *built.backward(slope, query, key, value, out, lse, bounds, scale))
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    expected = one_by_one(query, key, value, bounds, scale)
    theirs = (expected, *torch.autograd.grad(expected, inputs, slope))
    return all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(ours, theirs, strict=True)
    )


def one_by_one(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float) -> Tensor:
    """The same by torch's kernel, once for each sequence."""
    sizes: list[int] = bounds.diff().tolist()
    by_heads = (tensor.transpose(0, 1)[None].split(sizes, 2) for tensor in (query, key, value))
    parts = [
        functional.scaled_dot_product_attention(
            *sequence, is_causal=True, enable_gqa=True, scale=scale
        )
        for sequence in zip(*by_heads, strict=True)
    ]
    return torch.cat(parts, 2)[0].transpose(0, 1)
