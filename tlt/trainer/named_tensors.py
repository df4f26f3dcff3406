"""Copy and compare tensors by name; both sides have the same names and shapes, or it is refused."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tlt.errors import ConfigError


def copy_named(into: Mapping[str, Tensor], source: Mapping[str, Tensor], what: str) -> None:
    require_same_shapes(into, source, what)
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(source[name])


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
