"""The C kernel for products of few rows agrees with torch and doesn't depend on the other rows."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.engine.compiled import INSTRUCTION_SETS, built
from tests.engine.reference import answers, new_request, show
from tlt.base.id_types import PolicyVersion
from tlt.engine.base import Sampling
from tlt.engine.native import NativeEngine, few_row_products
from tlt.engine.native.few_row_products import MOST_ROWS, FewRowProducts, find_products
from tlt.models.decoder_from_folder import load_decoder

_CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def products(request: pytest.FixtureRequest) -> FewRowProducts:
    kernel = few_row_products.kernel
    return built(kernel, kernel.__wrapped__, request.param)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 13, 32])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 4), (80, 36), (576, 100)])
def test_equals_the_product_in_float64(
    products: FewRowProducts, rows: int, inputs: int, outputs: int
) -> None:
    # as in a layer, rows are views of wider ones
    x, matrix, bias = drawn(rows, 2 * inputs)[:, inputs:], drawn(outputs, inputs), drawn(outputs)
    right = x.double() @ matrix.double().t()
    out = torch.full((rows, outputs + 3), torch.nan)
    found = out[:, :outputs]
    products.multiply(x, matrix.t(), bias, found)
    torch.testing.assert_close(found.double(), right + bias, rtol=1e-4, atol=1e-4)
    products.add(x, matrix.t(), bias, found)
    torch.testing.assert_close(found.double(), 2 * (right + bias), rtol=1e-4, atol=1e-4)
    assert out[:, outputs:].isnan().all()


@pytest.mark.parametrize(("inputs", "outputs"), [(20, 8), (32, 7)])
def test_leaves_other_shapes_to_torch(products: FewRowProducts, inputs: int, outputs: int) -> None:
    x, matrix, out = drawn(3, inputs), drawn(outputs, inputs), torch.ones(3, outputs)
    products.multiply(x, matrix.t(), None, out)
    torch.testing.assert_close(out, x @ matrix.t())
    products.add(x, matrix.t(), matrix[:, 0].contiguous(), out)
    torch.testing.assert_close(out, 2 * (x @ matrix.t()) + matrix[:, 0])


def test_a_row_does_not_depend_on_the_others(products: FewRowProducts) -> None:
    x, matrix = drawn(MOST_ROWS, 576), drawn(200, 576)
    together = torch.empty(MOST_ROWS, 200)
    products.multiply(x, matrix.t(), None, together)
    for rows in range(1, MOST_ROWS):
        some = torch.empty(rows, 200)
        products.multiply(x[-rows:], matrix.t(), None, some)
        assert torch.equal(some, together[-rows:])


def test_is_used_for_few_rows_in_float32_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    found, states = few_row_products.kernel(), torch.empty(1, 128)
    if found is None:
        pytest.skip("no C compiler")
    assert find_products(MOST_ROWS, states) is found
    assert find_products(MOST_ROWS + 1, states) is not found
    assert find_products(1, states[:, :64]) is not found
    assert find_products(1, states.double()) is not found
    assert find_products(1, states.to("meta")) is not found
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert find_products(1, states) is not found


def test_decodes_the_same_tokens_without_a_compiler(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written() -> Sequence[Sequence[int]]:
        engine = NativeEngine(load_decoder(policy_folder), show, 5, 128, _CPU, PolicyVersion(0))
        submitted = [new_request(i, (3 + i, 4, 5 + i), Sampling(), 30) for i in range(9)]
        return [done.tokens for _, done in sorted(answers(engine, submitted).items())]

    monkeypatch.setattr(few_row_products, "_NARROWEST", 0)
    with_it = written()
    monkeypatch.setattr(few_row_products, "kernel", lambda: None)
    assert written() == with_it
