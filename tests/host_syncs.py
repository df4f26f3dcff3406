"""Tell which operations make the host wait for a device, and which line of ours asked for them.

A tensor is the device's if it says `is_cuda`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

Kind = Literal["read", "upload", "wait"]
_ROOT = Path(__file__).parent.parent
_OURSELVES = {__file__, str(Path(__file__).with_name("labelled_device.py"))}
_aten = torch.ops.aten

# these read their input on the host before they can return
_READING = {
    *(_aten._local_scalar_dense, _aten.equal, _aten.nonzero, _aten.masked_select),
    *(_aten.multinomial, _aten.unique_dim, _aten._unique2, _aten.bincount),
}
INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
COPYING = {_aten._to_copy, _aten.copy_}


class HostSync(NamedTuple):
    # `read`: the host waits for a value; `upload`: a copy to the device that the host waits for;
    # `wait`: a call that does nothing but wait
    kind: Literal["read", "upload", "wait"]
    operation: str
    # file and line of our code
    line: str


def syncs_of(
    func: OpOverload, args: Any, kwargs: dict[str, Any], target: torch.device | None
) -> Iterator[tuple[Kind, str]]:
    """Yield the syncs of an operation, whose result is asked for on `target`."""
    packet, name = func.overloadpacket, str(func.overloadpacket)
    if packet in COPYING:
        source = args[1] if packet is _aten.copy_ else args[0]
        into_cpu = target.type == "cpu" if target else not args[0].is_cuda
        asks = kwargs.get("non_blocking") or (packet is _aten.copy_ and args[2:] == (1,))
        # torch pins what `to` copies to the host without waiting
        host = args[0] if source.is_cuda else source
        pinned = _is_pinned(host) or (into_cpu and packet is _aten._to_copy)
        if source.is_cuda == into_cpu and not (asks and pinned):
            yield ("read" if into_cpu else "upload"), name
    elif packet in INDEXING:
        indices = [index for index in args[1] if index is not None]
        fills = packet is not _aten.index and args[2].numel() == 1 and len(indices) == 1
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices) and not fills:
            yield "read", f"{name} by a mask"
        for index in indices:
            if not index.is_cuda:
                yield "upload", f"{name} by an index of the host"
    elif packet in _READING or (
        packet is _aten.repeat_interleave and kwargs.get("output_size") is None
    ):
        yield "read", name


def mark_as_pinned(tensor: Tensor) -> None:
    tensor.is_labelled_as_pinned = True  # type: ignore[attr-defined]


def _is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor, "is_labelled_as_pinned", False)


def line_of_ours() -> str:
    """Return the innermost line outside of torch and of the labelled device."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(str(_ROOT)) and ".venv" not in file and file not in _OURSELVES:
            return f"{Path(file).relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
