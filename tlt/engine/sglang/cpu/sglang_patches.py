"""Patches of SGLang 0.5.23 for CPUs, applied in the scheduler's process before it starts."""

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.managers import overlap_utils
from sglang.srt.speculative import eagle_utils as upstream

from tlt.engine.sglang.cpu import draft_verification


def apply() -> None:
    # without AMX SGLang falls back to a backend that cannot verify drafts
    ATTENTION_BACKENDS["torch_native"] = ATTENTION_BACKENDS["intel_amx"]
    # on a CPU SGLang would verify greedily at every temperature
    upstream._verify_uses_greedy = _uses_greedy  # pyright: ignore[reportPrivateUsage]
    upstream.tree_speculative_sampling_target_only = (
        draft_verification.tree_speculative_sampling_target_only
    )
    upstream.top_k_renorm_prob = draft_verification.top_k_renorm_prob
    upstream.top_p_renorm_prob = draft_verification.top_p_renorm_prob
    # only where results come one pass late, as on a GPU, which tests ask for
    overlap_utils.gather_spec_extras = _gather_rows


def _gather_rows(
    indices: torch.Tensor, *buffers: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if buffer is None else buffer[indices] for buffer in buffers)


def _uses_greedy(*, is_all_greedy: bool, **build: bool) -> bool:
    return is_all_greedy
