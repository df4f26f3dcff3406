"""Read and write named tensors as safetensors files, the only form in which a rank sends blobs."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tlt.blobs import Blobs
from tlt.errors import BlobError, BlobLost
from tlt.interrupt_check import CheckInterrupt, never_interrupt
from tlt.protocol.refs import BlobRef


def read_weights(
    blobs: Blobs, ref: BlobRef, check: CheckInterrupt = never_interrupt
) -> dict[str, torch.Tensor]:
    """Map a blob's tensors without copying, after verifying its checksum."""
    path = blobs.verify(ref, check)
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise BlobLost(f"{path}: released while it was read") from error
    except SafetensorError as error:
        raise BlobError(f"blob {ref.digest} is no safetensors file: {error}") from error


def put_weights(
    blobs: Blobs,
    tensors: Mapping[str, torch.Tensor],
    *,
    commit: bool,
    check: CheckInterrupt = never_interrupt,
) -> BlobRef:
    return blobs.put_file(lambda file: write_weights(file, tensors), commit=commit, check=check)


def write_weights(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write with the metadata that Transformers insists on."""
    dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(dense, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise BlobError(f"{file}: cannot be written: {error}") from error
