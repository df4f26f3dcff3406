"""Convert and send weights a part at a time, so that a second copy of all never exists."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

# of tensors that are converted and sent together
PART_BYTES = 1 << 30


class ConvertedWeights(Mapping[str, Tensor]):
    """Weights in another format, each converted whenever it is read."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._weights = weights
        self._dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name].detach()
        # the sender moves a host tensor's storage into shared memory, where it would stay
        return weight.to(self._dtype, copy=weight.device.type == "cpu")

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def parts_of(weights: Mapping[str, Tensor], most: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield named tensors in parts of at most `most` bytes; a larger one is a part of its own."""
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name in weights:
        tensor = weights[name]
        if part and size + tensor.nbytes > most:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    if part:
        yield part
