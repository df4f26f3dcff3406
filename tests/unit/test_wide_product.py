"""A product of half formats isn't rounded to them."""

import pytest
import torch

from tlt.models.float32_product import multiply_wide


@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 40)])
def test_keeps_the_precision_of_the_sum(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    rows, matrix = torch.randn(shape).bfloat16(), torch.randn(700, 40).bfloat16()
    exact = rows.double() @ matrix.double().t()
    found = multiply_wide(rows, matrix)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert (found != found.bfloat16()).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leaves_other_formats_alone(dtype: torch.dtype) -> None:
    rows, matrix = torch.randn(3, 8, dtype=dtype), torch.randn(5, 8, dtype=dtype)
    assert torch.equal(multiply_wide(rows, matrix), torch.nn.functional.linear(rows, matrix))


def test_fills_the_given_memory() -> None:
    rows, matrix = torch.randn(3, 8).bfloat16(), torch.randn(5, 8).bfloat16()
    out = torch.empty(3, 5)
    assert multiply_wide(rows, matrix, out).data_ptr() == out.data_ptr()
    assert torch.equal(out, multiply_wide(rows, matrix))
