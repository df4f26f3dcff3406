"""Compare the weights that were sent with the checksums of those that SGLang holds.

SGLang fuses projections that read the same input, and pads some tensors with zeros; the names here
are SGLang's.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_PARTS = {part: whole for whole, parts in _FUSED.items() for part in parts}
_BY_VOCABULARY = {"model.embed_tokens", "lm_head"}
_VOCABULARY = 64
# what files call the layer of an EAGLE-3 drafter, and what SGLang does
_EAGLE3_LAYER = ("midlayer.", "layers.0.")
# on a CPU, the feed-forward part's intermediate width is padded to a multiple of this
_INTERMEDIATE = 32


class Comparison(NamedTuple):
    # the first tensor whose checksum differs from that of what was sent, or None
    wrong: str | None
    # True if SGLang's checksums are of another kind than ours, so that they tell nothing
    is_foreign: bool = False


def compare(
    weights: Mapping[str, torch.Tensor],
    before: Mapping[str, str],
    held: Mapping[str, str],
    checksum: Callable[[torch.Tensor], str],
    on_cpu: bool,
) -> Comparison:
    """Compare what was sent with the checksums that SGLang held `before` the update and holds now.

    If all differ although the update changed some, SGLang computes them in another way.
    """
    wrong: str | None = None
    some_right = False
    for name, tensor in _as_held(weights, _INTERMEDIATE if on_cpu else 1):
        # a tied head is held under the embedding's name alone
        if name not in held and name == "lm_head.weight":
            continue
        if held.get(name) == checksum(tensor):
            some_right = True
        elif wrong is None:
            wrong = name
        if wrong is not None and some_right:
            return Comparison(wrong)
    if wrong is None:
        return Comparison(None)
    return Comparison(wrong, is_foreign=before != held and wrong in held)


def drafter_as_held(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a drafter's weights by the names that SGLang holds them under."""
    return {
        name if name.startswith("lm_head.") else f"model.{name.replace(*_EAGLE3_LAYER)}": weight
        for name, weight in weights.items()
        # a table of tokens, which is no parameter in SGLang
        if name != "d2t"
    }


def _as_held(
    weights: Mapping[str, torch.Tensor], intermediate: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights.items():
        stem, _, kind = name.rpartition(".")
        layer, part = _split_name(stem)
        whole = _PARTS.get(part)
        if part in _BY_VOCABULARY:
            yield name, _padded(tensor, 0, _VOCABULARY)
        elif part == "mlp.down_proj" and kind == "weight":
            yield name, _padded(tensor, 1, intermediate)
        elif whole is None:
            yield name, tensor
        elif part == _FUSED[whole][0]:
            parts = [weights[f"{layer}{other}.{kind}"] for other in _FUSED[whole]]
            if whole == "mlp.gate_up_proj":
                parts = [_padded(tensor, 0, intermediate) for tensor in parts]
            yield f"{layer}{whole}.{kind}", torch.cat(parts)


def _padded(tensor: torch.Tensor, dimension: int, multiple: int) -> torch.Tensor:
    missing = -tensor.shape[dimension] % multiple
    behind = 2 * (tensor.dim() - 1 - dimension)
    return F.pad(tensor, [0] * behind + [0, missing])


def _split_name(stem: str) -> tuple[str, str]:
    """Split model.layers.3.mlp.up_proj into model.layers.3. and mlp.up_proj."""
    pieces = stem.split(".")
    if pieces[:2] != ["model", "layers"]:
        return "", stem
    return ".".join(pieces[:3]) + ".", ".".join(pieces[3:])
