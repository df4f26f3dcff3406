"""Reward long answers less before they reach the limit (DAPO's soft punishment, 2503.14476)."""

from tlt.spec.config import AlgorithmSpec


def overlong_penalty(spec: AlgorithmSpec, length: int, limit: int) -> float:
    """Return what an answer loses: nothing before the last tokens, all of it at the limit."""
    if spec.overlong_tokens == 0:
        return 0.0
    beyond = length - (limit - spec.overlong_tokens)
    return spec.overlong_penalty * min(max(beyond / spec.overlong_tokens, 0.0), 1.0)
