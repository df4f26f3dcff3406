"""Scores that are computed again in the backward pass give the gradients of stored ones."""

import pytest
import torch
from torch import Tensor

from tlt.trainer.drafter import chain_attention
from tlt.trainer.drafter.chain_attention import KeysValues, attend

HEADS, KV_HEADS, WIDTH = 4, 2, 8
BOUNDS = torch.tensor([0, 5, 17])


def inputs() -> list[Tensor]:
    """Return queries, and keys and values of three steps and a prefix."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(HEADS, 17, WIDTH)] + 6 * [(KV_HEADS, 17, WIDTH)] + 2 * [(KV_HEADS, 6, WIDTH)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("prefixed", [False, True])
def test_recomputed_scores_give_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, prefixed: bool
) -> None:
    found: list[list[Tensor]] = []
    for most in (1 << 40, 0):
        monkeypatch.setattr(chain_attention, "MOST_STORED", most)
        tensors = inputs()
        queries, *others = tensors
        first, *later, prefix = map(KeysValues, others[::2], others[1::2])
        # a prefix precedes one sample only
        bounds = torch.tensor([0, 17]) if prefixed else BOUNDS
        out = attend(queries, first, later, bounds, prefix if prefixed else None)
        out.square().sum().backward()
        found.append([out, *(tensor.grad for tensor in tensors if tensor.grad is not None)])
    assert len(found[0]) == (10 if prefixed else 8)
    for stored, again in zip(*found, strict=True):
        assert torch.equal(stored, again)
