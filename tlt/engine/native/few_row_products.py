"""Products of a pass with weights: torch's, or for few rows on a CPU our own C, which is faster.

For 4 to 32 rows torch takes up to twice as long as it takes to read the matrix. Ours is as fast as
memory up to some 8 rows, and a row's result doesn't depend on the others.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from tlt.kernels.c_build import build_kernels
from tlt.models.float32_product import multiply_wide

_SOURCE = Path(__file__).with_name("few_row_products.c")
# with more, torch is faster
MOST_ROWS = 32
# in a narrower model, calling C from Python takes as long as a product
_NARROWEST = 128


class Products(Protocol):
    def multiply(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Write x [rows, inputs] times the matrix [inputs, outputs] to `out`."""
        ...

    def add(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Add x [rows, inputs] times the matrix [inputs, outputs] to `out`."""
        ...


class TorchProducts:
    def multiply(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        if bias is None:
            torch.mm(x, matrix, out=out)
        else:
            torch.addmm(bias, x, matrix, out=out)

    def add(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        out.addmm_(x, matrix)
        if bias is not None:
            out.add_(bias)


class FewRowProducts:
    """Products in float32, of rows and transposed matrices that are each contiguous."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, long = ctypes.c_void_p, ctypes.c_long
        self._run = library.multiply_few_rows
        self._run.argtypes = (
            *(pointer, long, pointer, long, long, long),
            *(pointer, long, ctypes.c_int),
        )

    def multiply(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        if not self._multiply(x, matrix, out, False):
            _TORCH.multiply(x, matrix, bias, out)
        elif bias is not None:
            out.add_(bias)

    def add(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        if not self._multiply(x, matrix, out, True):
            _TORCH.add(x, matrix, bias, out)
        elif bias is not None:
            out.add_(bias)

    def _multiply(
        self, x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor, add: bool
    ) -> bool:
        """Return False if the shape isn't supported."""
        return not self._run(
            *(x.data_ptr(), x.stride(0), matrix.data_ptr(), len(x), *matrix.shape),
            *(out.data_ptr(), out.stride(0), add),
        )


_TORCH = TorchProducts()


def find_products(rows: int, states: torch.Tensor) -> Products:
    """Return what is fastest for so many rows, on the device of a model's states [..., width]."""
    fits = (
        rows <= MOST_ROWS
        and states.shape[-1] >= _NARROWEST
        and states.dtype == torch.float32
        and states.device.type == "cpu"
        and torch.get_num_threads() == 1
    )
    return (kernel() or _TORCH) if fits else _TORCH


def multiply_by_head(x: torch.Tensor, head: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return logits, written to `out`; x and head may be of a half format, logits never are.

    Noise decides between tokens that a half format can't tell apart.
    """
    products = find_products(len(x), head)
    if products is _TORCH:
        return multiply_wide(x, head, out)
    products.multiply(x, head.t(), None, out)
    return out


@cache
def kernel() -> FewRowProducts | None:
    """Build the C kernel, or log why that fails and return None."""
    return build_kernels([_SOURCE], FewRowProducts, _agrees_with_torch)


def _agrees_with_torch(compiled: FewRowProducts) -> bool:
    generator = torch.Generator().manual_seed(0)
    for rows, inputs, outputs in ((1, 32, 4), (3, 64, 12), (8, 48, 20), (19, 80, 32)):
        x = torch.randn(rows, inputs, generator=generator)
        matrix = torch.randn(outputs, inputs, generator=generator).t()
        out = torch.full((rows, outputs), torch.nan)
        compiled.multiply(x, matrix, None, out)
        compiled.add(x, matrix, None, out)
        if not torch.allclose(out, 2 * (x @ matrix), rtol=1e-3, atol=1e-3):
            return False
    return True
