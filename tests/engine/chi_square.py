"""Pearson's test of drawn tokens against a distribution, and what it is able to see."""

import torch


def p_value(counts: torch.Tensor, distribution: torch.Tensor, at_least: int = 10) -> float:
    """Return how likely draws are at least this far off by chance, rare tokens taken together.

    At least `at_least` other tokens must remain, or the test says little.
    """
    expected = distribution.double() * counts.sum()
    common = expected >= 5
    seen = torch.cat([counts[common], counts[~common].sum()[None]]).double()
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    seen, expected = seen[expected > 0], expected[expected > 0]
    assert len(expected) > at_least
    statistic = ((seen - expected) ** 2 / expected).sum()
    return _above(statistic, torch.tensor(len(expected) - 1.0).double()).item()


def power(draws: int, variation: float, bins: int, significance: float) -> float:
    """The chance of a p-value below `significance` when the distribution is off by `variation`.

    Of all ways to be off by that total variation, this is for the one that is hardest to see:
    every probability changed by the same factor, up or down.
    """
    freedom = torch.tensor(bins - 1.0).double()
    low, high = torch.zeros_like(freedom), 100 * freedom
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _above(middle, freedom) > significance else (low, middle)
    # a noncentral chi-square is a Poisson mixture of central ones
    half = draws * (2 * variation) ** 2 / 2
    extra = torch.arange(int(half * 3) + 100).double()
    weights = (extra * torch.tensor(half).double().log() - half - torch.lgamma(extra + 1)).exp()
    return (weights * _above(low, freedom + 2 * extra)).sum().item()


def hardest_to_see(distribution: torch.Tensor, variation: float) -> torch.Tensor:
    """A distribution that is off by so much, in the way that `power` speaks of."""
    order = distribution.argsort(descending=True)
    signs = torch.zeros_like(distribution)
    balance = 0.0
    for token in order.tolist():
        signs[token] = -1.0 if balance > 0 else 1.0
        balance += (signs[token] * distribution[token]).item()
    off = distribution * (1 + 2 * variation * signs)
    return off / off.sum()


def _above(statistic: torch.Tensor, freedom: torch.Tensor) -> torch.Tensor:
    return torch.special.gammaincc(freedom / 2, statistic / 2)
