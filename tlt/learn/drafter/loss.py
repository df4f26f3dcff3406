"""Cross-entropy to the policy's whole distribution, never more than CHUNK logits of it at once.

The distribution is the head of the policy's last state, so nothing but states has to be kept.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tlt.learn import scores
from tlt.models.drafter import Drafter


class Distance(NamedTuple):
    """Sums over the rows."""

    loss: Tensor
    # probability that both distributions have in common: what shared noise would accept, roughly
    overlap: Tensor


def distance(drafter: Drafter, readout: Tensor, last_states: Tensor, head: Tensor) -> Distance:
    """Of the drafter's distributions from the policy's, both [rows, hidden]."""
    rows = max(1, scores.CHUNK // len(head))
    if len(readout) <= rows:
        return Distance(*_distance(drafter, readout, last_states, head))
    parts = [
        checkpoint(_distance, drafter, ours, theirs, head, use_reentrant=False)
        for ours, theirs in zip(readout.split(rows), last_states.split(rows), strict=True)
    ]
    losses, overlaps = zip(*parts, strict=True)
    return Distance(torch.stack(losses).sum(), torch.stack(overlaps).sum())


def _distance(
    drafter: Drafter, readout: Tensor, last_states: Tensor, head: Tensor
) -> tuple[Tensor, Tensor]:
    found = drafter.logits(readout, head).log_softmax(-1)
    with torch.no_grad():
        # a head of the drafter's own has rows for some tokens only
        known = head[drafter.tokens(torch.arange(found.shape[1], device=head.device))]
        aims = F.linear(last_states, known).softmax(-1)
        overlap = torch.minimum(aims, found.exp()).sum()
    return -(aims * found).sum(), overlap
