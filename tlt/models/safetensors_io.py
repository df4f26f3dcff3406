"""Read and write named tensors as safetensors files, the only form in which a rank sends blobs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tlt.base.interrupt_check import CheckInterrupt, never_interrupt
from tlt.blobs.blob_digest import Leaf, write_leaves
from tlt.blobs.blob_files import Blobs
from tlt.errors import BlobError, BlobLost
from tlt.models.weight_leaves import Layout, pieces_of
from tlt.protocol.refs import BlobRef


def read_weights(
    blobs: Blobs, ref: BlobRef, check: CheckInterrupt = never_interrupt
) -> dict[str, torch.Tensor]:
    """Map a blob's tensors without copying, after verifying its checksum."""
    return map_weights(blobs.verify(ref, check))


def map_weights(file: Path) -> dict[str, torch.Tensor]:
    """Map a blob's tensors; those who map one file share its memory."""
    try:
        return load_file(file)
    except FileNotFoundError as error:
        raise BlobLost(f"{file}: released while it was read") from error
    except SafetensorError as error:
        raise BlobError(f"blob {file.name} is no safetensors file: {error}") from error


def put_weights(
    blobs: Blobs,
    tensors: Mapping[str, torch.Tensor],
    *,
    commit: bool,
    check: CheckInterrupt = never_interrupt,
) -> BlobRef:
    return blobs.put_leaves(_leaves(tensors), commit=commit, check=check)


def write_weights(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    _write(file, _leaves(tensors))


def stream_weights(
    file: Path,
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """Write tensors that are read one by one, so that they needn't be in memory together."""
    layout = Layout({name: (shape, dtype) for name, shape in shapes.items()})
    _write(file, layout.leaves(pieces_of(layout, read)))


def _leaves(tensors: Mapping[str, torch.Tensor]) -> Iterator[Leaf]:
    layout = Layout({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    devices = (tensor.device for tensor in tensors.values() if tensor.device.type != "cpu")
    device = next(devices, torch.device("cpu"))
    return layout.leaves(pieces_of(layout, tensors.__getitem__), device)


def _write(file: Path, leaves: Iterable[Leaf]) -> None:
    try:
        write_leaves(file, leaves, never_interrupt)
    except OSError as error:
        raise BlobError(f"{file}: cannot be written: {error.strerror}") from error
