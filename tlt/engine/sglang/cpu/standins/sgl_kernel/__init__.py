"""A stand-in for SGLang's compiled kernels: the same names, in torch."""

from collections.abc import Callable
from typing import Any

import torch

from tlt.engine.sglang.cpu import draft_verification, kv_pool_attention, kv_pool_locations
from tlt.engine.sglang.cpu.raising_placeholder_ops import MissingOp, missing

assign_draft_cache_locs_contiguous_cpu = kv_pool_locations.assign_draft_cache_locs_contiguous
assign_extend_cache_locs_cpu = kv_pool_locations.assign_extend_cache_locs
assign_req_to_token_pool_cpu = kv_pool_locations.assign_req_to_token_pool
build_draft_decode_metadata_cpu = kv_pool_locations.build_draft_decode_metadata
build_tree_kernel_efficient_cpu = draft_verification.build_tree_kernel_efficient
copy_all_layer_kv_cache_cpu = kv_pool_locations.copy_all_layer_kv_cache
fill_bonus_tokens_cpu = draft_verification.fill_bonus_tokens
verify_tree_greedy_cpu = draft_verification.verify_tree_greedy


class _Ops:
    decode_attention_cpu = staticmethod(kv_pool_attention.decode_attention)
    extend_attention_cpu = staticmethod(kv_pool_attention.extend_attention)

    def __getattr__(self, name: str) -> Any:
        raise MissingOp(f"torch.ops.sgl_kernel.{name} has no CPU stand-in")


setattr(torch.ops, "sgl_kernel", _Ops())  # noqa: B010


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(f"sgl_kernel.{name}")
