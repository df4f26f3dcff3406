"""Multiply matrices of a half format, with a product that isn't rounded to that format.

Logits in bfloat16 are off by more than a tenth, which changes what is sampled.
"""

import torch
import torch.nn.functional as F

# outputs that are computed at once on a CPU, where the matrix is widened: as many as fit its cache
_BLOCK = 256


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half formats, and other formats unchanged."""
    return torch.promote_types(dtype, torch.float32)


def multiply_wide(
    rows: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return rows [..., inputs] times the transposed matrix [outputs, inputs].

    Rows are converted to the matrix's format; the product is in float32 at least.
    """
    kind = wide(matrix.dtype)
    rows = rows.to(matrix.dtype)
    if matrix.dtype == kind:
        return F.linear(rows, matrix) if out is None else torch.mm(rows, matrix.t(), out=out)
    flat = rows.flatten(0, -2)
    if out is None:
        out = rows.new_empty(len(flat), len(matrix), dtype=kind)
    if matrix.device.type == "cuda":
        torch.mm(flat, matrix.t(), out_dtype=kind, out=out)
    else:
        flat = flat.to(kind)
        for part, block in zip(out.split(_BLOCK, 1), matrix.split(_BLOCK), strict=True):
            part.copy_(flat @ block.to(kind).t())
    return out.view(*rows.shape[:-1], -1)
