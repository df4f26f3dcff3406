"""Named tensors in safetensors files, which is all that ever leaves a rank as a blob."""

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from tlt.blobs import Blobs
from tlt.errors import BlobError
from tlt.messages import BlobRef


def read_weights(blobs: Blobs, ref: BlobRef) -> dict[str, torch.Tensor]:
    """Only what has the checksum that is its name."""
    try:
        return load(blobs.get(ref))
    except SafetensorError as error:
        raise BlobError(f"blob {ref.digest} is no safetensors file: {error}") from error


def to_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """With the metadata that Transformers insists on."""
    return save(
        {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()},
        metadata={"format": "pt"},
    )
