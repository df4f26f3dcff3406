"""Send weights to SGLang in parts, and compare the checksums of those that it holds.

SGLang fuses projections that read the same input, pads some tensors with zeros, and divides most
among the ranks of a tensor-parallel group; the names here are SGLang's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# of tensors that are converted and sent together
PART_BYTES = 1 << 30


class ConvertedWeights(Mapping[str, Tensor]):
    """Weights on a device in another format, each converted whenever it is read.

    Whole numbers keep their format.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name].detach()
        dtype = self._dtype if weight.is_floating_point() else weight.dtype
        if weight.device.type != "cpu":
            return weight.to(dtype).to(self._device)
        # the sender moves a host tensor's storage into shared memory, where it would stay
        return weight.to(self._device).to(dtype, copy=self._device.type == "cpu")

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def parts_of(weights: Mapping[str, Tensor], most: int) -> Iterator[dict[str, Tensor]]:
    """Yield tensors in parts of at most `most` bytes; those that SGLang fuses stay together."""
    fused: dict[str, list[str]] = {}
    for name in weights:
        fused.setdefault(_fused_name(name), []).append(name)
    part: dict[str, Tensor] = {}
    for names in fused.values():
        group = {name: weights[name] for name in names}
        if part and sum(tensor.nbytes for tensor in (part | group).values()) > most:
            yield part
            part = {}
        part |= group
    if part:
        yield part


_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_PARTS = {part: whole for whole, parts in _FUSED.items() for part in parts}


def _fused_name(name: str) -> str:
    """Return the name of what SGLang fuses a tensor into, or the tensor's own."""
    whole = (name.replace(part, whole) for part, whole in _PARTS.items() if part in name)
    return next(whole, name)


_VOCABULARY = 64
# what files call the layer of an EAGLE-3 drafter, and what SGLang does
_EAGLE3_LAYER = ("midlayer.", "layers.0.")
# on a CPU, each rank's part of the feed-forward part's width is padded to a multiple of this
_INTERMEDIATE = 32
# dimension along which a tensor is divided among ranks, by the end of its name
_DIVIDED = {
    "embed_tokens.weight": 0,
    "lm_head.weight": 0,
    **{f"{part}.{kind}": 0 for part in _PARTS for kind in ("weight", "bias")},
    "self_attn.o_proj.weight": 1,
    "mlp.down_proj.weight": 1,
}

# by rank: checksums by the name of a tensor
Checksums = Sequence[Mapping[str, str]]


class Comparison(NamedTuple):
    # the first tensor whose checksum differs from that of what was sent, or None
    wrong: str | None
    # True if SGLang's checksums are of another kind than ours, so that they tell nothing
    is_foreign: bool = False


def checksums_of(
    weights: Mapping[str, Tensor], ranks: int, checksum: Callable[[Tensor], str], on_cpu: bool
) -> dict[str, list[str]]:
    """Return by name and rank the checksums of what SGLang should hold."""
    held = _as_held(weights, ranks, on_cpu)
    return {name: [checksum(part) for part in parts] for name, parts in held}


def compare(
    expected: Mapping[str, Sequence[str]], before: Checksums, held: Checksums
) -> Comparison:
    """Compare what was sent with the checksums that SGLang held `before` the update and holds now.

    If all differ although the update changed some, SGLang computes them in another way.
    """
    wrong: str | None = None
    some_right = False
    for name, by_rank in expected.items():
        for sums, own in zip(held, by_rank, strict=True):
            # a tied head is held under the embedding's name alone
            if name not in sums and name == "lm_head.weight":
                continue
            if sums.get(name) == own:
                some_right = True
            elif wrong is None:
                wrong = name
    if wrong is None or some_right:
        return Comparison(wrong)
    return Comparison(wrong, is_foreign=before != held and wrong in held[0])


def drafter_as_held(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a drafter's weights by the names that SGLang holds them under."""
    return {
        name if name.startswith("lm_head.") else f"model.{name.replace(*_EAGLE3_LAYER)}": weight
        for name, weight in weights.items()
        # a table of tokens, which is no parameter in SGLang
        if name != "d2t"
    }


def _as_held(
    weights: Mapping[str, torch.Tensor], ranks: int, on_cpu: bool
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield each tensor's name and, by rank, what is held of it."""
    for name, tensor in weights.items():
        stem, _, kind = name.rpartition(".")
        layer, part = _split_name(stem)
        whole = _PARTS.get(part)
        if whole is None:
            yield name, _divided(name, tensor, ranks, on_cpu)
        elif part == _FUSED[whole][0]:
            names = [f"{layer}{other}.{kind}" for other in _FUSED[whole]]
            parts = [_divided(name, weights[name], ranks, on_cpu) for name in names]
            yield f"{layer}{whole}.{kind}", list(map(torch.cat, zip(*parts, strict=True)))


def _divided(name: str, tensor: torch.Tensor, ranks: int, on_cpu: bool) -> list[torch.Tensor]:
    ends = (end for end in _DIVIDED if name == end or name.endswith(f".{end}"))
    if (end := next(ends, None)) is None:
        return [tensor] * ranks
    dimension, multiple = _DIVIDED[end], 1
    if end in ("embed_tokens.weight", "lm_head.weight"):
        rows = tensor.shape[0] + -tensor.shape[0] % _VOCABULARY
        multiple = _VOCABULARY if rows % ranks == 0 else _VOCABULARY * ranks
    elif end.startswith("mlp.") and on_cpu:
        multiple = _INTERMEDIATE * ranks
    return [
        part.contiguous() for part in _padded(tensor, dimension, multiple).chunk(ranks, dimension)
    ]


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
