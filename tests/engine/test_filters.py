"""Filters keep the same tokens, whichever way finds their threshold."""

import pytest
import torch

from tlt.engine.base import Sampling
from tlt.engine.native import token_sampler
from tlt.engine.native.token_sampler import Filters

VOCABULARY = 50
SETTINGS = [
    [Sampling(top_k=1), Sampling(top_k=7), Sampling()],
    [Sampling(top_k=VOCABULARY), Sampling(top_k=2 * VOCABULARY)],
    [Sampling(min_p=0.1), Sampling(min_p=0.5)],
    [Sampling(top_k=5, min_p=0.05), Sampling()],
    [Sampling(top_p=0.3), Sampling(top_p=0.7, top_k=9), Sampling(top_k=30), Sampling()],
    # keeps all but a few tokens
    [Sampling(top_p=0.999), Sampling(top_p=0.01, min_p=0.2)],
]


def left(logits: torch.Tensor, one: Sampling) -> torch.Tensor:
    """Return True for the tokens of a row that are at least as likely as the last one kept."""
    ordered = logits.sort(descending=True).values
    threshold = ordered[min(one.top_k or VOCABULARY, VOCABULARY) - 1]
    chances = ordered[ordered >= threshold].softmax(0)
    if one.top_p < 1:
        inside = int((chances.cumsum(0) - chances < one.top_p).sum())
        threshold = max(threshold, ordered[inside - 1])
    if one.min_p:
        threshold = max(threshold, ordered[0] + torch.tensor(one.min_p).double().log())
    return logits >= threshold


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("narrow", [1, 8, VOCABULARY])
def test_filters_each_row_by_its_own_settings(
    settings: list[Sampling], narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_sampler, "FIRST_SORTED", narrow)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(settings), 3, VOCABULARY, generator=generator, dtype=torch.float64)
    logits = logits.mul_(2).round(decimals=1)  # rounding makes ties
    filtered = Filters(settings, logits).apply(logits, slice(0, len(settings)))
    for row, one in enumerate(settings):
        for position in range(3):
            kept = left(logits[row, position], one)
            expected = logits[row, position].masked_fill(~kept, -torch.inf)
            assert torch.equal(filtered[row, position], expected), one
