"""Copy and compare tensors by name; both sides have the same names and shapes, or it is refused."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from tlt.errors import ConfigError


def copy_named(into: Mapping[str, Tensor], source: Mapping[str, Tensor], what: str) -> None:
    require_same_shapes(into, source, what)
    for name, tensor in into.items():
        copy_tensor(tensor, source[name])


def copy_tensor(into: Tensor, source: Tensor) -> None:
    """Copy a whole tensor; a shard gets its part, without communication."""
    with torch.no_grad():
        if isinstance(into, DTensor):
            whole = source.to(into.dtype)
            mesh, placements = into.device_mesh, into.placements
            part = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            into.to_local().copy_(part.to_local())
        else:
            into.copy_(source)


def require_same_shapes(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], what: str
) -> None:
    """Raise ConfigError unless `actual`, which the message calls `what`, matches."""
    if odd := sorted(expected.keys() ^ actual.keys()):
        missing = [name for name in odd if name in expected]
        complaint = f"lacks {missing[0]}" if missing else f"has an unknown {odd[0]}"
        raise ConfigError(f"the {what} {complaint} ({len(odd)} names differ)")
    for name, tensor in expected.items():
        if tensor.shape != actual[name].shape:
            shapes = f"{tuple(actual[name].shape)} instead of {tuple(tensor.shape)}"
            raise ConfigError(f"the {what} has {name} of shape {shapes}")
