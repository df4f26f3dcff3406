"""Named tensors in safetensors files, which is all that ever leaves a rank as a blob."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from tlt.errors import BlobError


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except Exception as error:  # safetensors has an exception of its own and passes on others
        raise BlobError(f"{path}: cannot be read as safetensors: {error}") from error


def to_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """With the metadata that Transformers insists on."""
    return save(
        {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()},
        metadata={"format": "pt"},
    )
