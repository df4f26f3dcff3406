"""Weights are sent in parts that are no larger than asked for, each tensor once."""

import pytest
import torch

from tests.trainer.models import CPU
from tlt.engine.sglang.client.weight_parts_and_checksums import ConvertedWeights, parts_of


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (10**9, [["a", "b", "c", "d"]]),
        (400, [["a"], ["b"], ["c", "d"]]),
        (1, [["a"], ["b"], ["c"], ["d"]]),
    ],
)
def test_splits_in_order(most: int, expected: list[list[str]]) -> None:
    weights = {name: torch.zeros(n) for name, n in (("a", 100), ("b", 200), ("c", 40), ("d", 60))}
    parts = list(parts_of(weights, most))
    assert [[*part] for part in parts] == expected
    assert all(tensor is weights[name] for part in parts for name, tensor in part.items())


def test_what_sglang_fuses_is_sent_together() -> None:
    """Its checksum can be computed only of all."""
    names = ["q_proj.weight", "o_proj.weight", "v_proj.weight", "k_proj.weight"]
    weights = {
        f"{layer}.self_attn.{name}": torch.zeros(50)
        for name in names
        for layer in ("model.layers.0", "model.layers.1", "midlayer")
    }
    for part in parts_of(weights, 300):
        for name in part:
            layer, _, kind = name.partition("self_attn.")
            if not kind.startswith("o_proj"):
                assert {f"{layer}self_attn.{p}_proj.weight" for p in "qkv"} <= part.keys()


def test_converts_what_is_read() -> None:
    weights = {"a": torch.randn(3, requires_grad=True), "b": torch.zeros(2)}
    found = ConvertedWeights(weights, torch.bfloat16, CPU)
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(
        weights, torch.bfloat16
    )
    assert torch.equal(found["a"], weights["a"].detach().bfloat16())
    assert not found["a"].requires_grad


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_host_weights_are_copied_whatever_their_format(held: torch.dtype) -> None:
    """Their sender moves what it is given into shared memory."""
    weights = {"a": torch.ones(4, dtype=held), "b": torch.ones(2, dtype=held)}
    for part in parts_of(ConvertedWeights(weights, torch.bfloat16, CPU), 8):
        for name, tensor in part.items():
            assert tensor.dtype == torch.bfloat16
            assert tensor.data_ptr() != weights[name].data_ptr()
            # as multiprocessing does when it sends a tensor
            tensor.share_memory_()
    assert not any(weight.is_shared() for weight in weights.values())
