"""Compare drawn tokens with a distribution by Pearson's test, and compute the test's power."""

import torch


def p_value(counts: torch.Tensor, distribution: torch.Tensor, at_least: int = 10) -> float:
    """Return the probability that correct draws deviate at least this much.

    Rare tokens share a bin; more than `at_least` bins must remain for the test to be meaningful.
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
    """Return the chance of a p-value below `significance` at this total `variation`.

    Assume the deviation that is hardest to detect: every probability is changed by the same
    factor, up or down.
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
    """Return the distribution with the deviation that `power` assumes."""
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
