"""Which tokens filters leave does not depend on how the threshold is found."""

import pytest
import torch

from tlt.engine.base import Sampling
from tlt.engine.native.sampling import Filters

VOCABULARY = 50


@pytest.mark.parametrize(
    "settings",
    [
        [Sampling(top_k=1), Sampling(top_k=7), Sampling()],
        [Sampling(top_k=VOCABULARY), Sampling(top_k=2 * VOCABULARY)],
        [Sampling(min_p=0.1), Sampling(min_p=0.5, temperature=0.7)],
        [Sampling(top_k=5, min_p=0.05), Sampling()],
    ],
)
def test_without_top_p_nothing_has_to_be_sorted(settings: list[Sampling]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(settings), 3, VOCABULARY, generator=generator).mul_(2)
    logits = logits.round(decimals=1)  # so that some tie
    filters, every = Filters(settings, logits), slice(0, len(settings))
    left = filters.apply(logits, every)
    assert torch.equal(
        left, logits.masked_fill(logits < filters._sorted(logits, every), -torch.inf)
    )
    # beside one that needs it
    both = Filters([*settings, Sampling(top_p=0.5)], logits)
    assert torch.equal(
        left, both.apply(torch.cat([logits, logits[:1]]), slice(0, len(settings) + 1))[:-1]
    )
