"""Patches of SGLang 0.5.23 for CPUs, applied in the scheduler's process before it starts."""

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.speculative import eagle_utils as upstream

from tlt.engine.sglang.cpu import draft_verification


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


def apply() -> None:
    # without AMX SGLang falls back to a backend that cannot verify drafts
    ATTENTION_BACKENDS["torch_native"] = ATTENTION_BACKENDS["intel_amx"]
    # on a CPU SGLang would verify greedily at every temperature
    upstream._verify_uses_greedy = _uses_greedy  # pyright: ignore[reportPrivateUsage]
    upstream.tree_speculative_sampling_target_only = (
        draft_verification.tree_speculative_sampling_target_only
    )
    upstream.top_k_renorm_prob = top_k_renorm_prob
    upstream.top_p_renorm_prob = top_p_renorm_prob


def _uses_greedy(*, is_all_greedy: bool, **build: bool) -> bool:
    return is_all_greedy
