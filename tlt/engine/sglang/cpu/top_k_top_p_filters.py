"""Top-k and top-p on probabilities: the rest becomes zero, and the sum stays one."""

import torch


def top_k_renorm_prob(probabilities: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Keep the k largest, and all that tie with the last of them."""
    falling = probabilities.sort(dim=-1, descending=True).values
    last = k.view(-1, 1).long().clamp(1, probabilities.shape[-1]) - 1
    return _normalise(probabilities.masked_fill(probabilities < falling.gather(1, last), 0.0))


def top_p_renorm_prob(probabilities: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Keep the fewest tokens that together reach p."""
    falling, order = probabilities.sort(dim=-1, descending=True)
    beyond = falling.cumsum(-1) - falling >= p.view(-1, 1)
    beyond[:, 0] = False
    kept = falling.masked_fill(beyond, 0.0)
    return _normalise(torch.zeros_like(probabilities).scatter_(1, order, kept))


def _normalise(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True)
