"""Read and write named tensors as safetensors files, the only form in which a rank sends blobs."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tlt.base.interrupt_check import CheckInterrupt, never_interrupt
from tlt.blobs.blob_files import Blobs
from tlt.errors import BlobError, BlobLost
from tlt.protocol.refs import BlobRef

_TYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


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


def stream_weights(
    file: Path,
    shapes: Mapping[str, Sequence[int]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write tensors one by one, so that they needn't be in memory together."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    kind, end = _TYPE_NAMES[dtype], 0
    for name, shape in shapes.items():
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    try:
        with file.open("wb") as out:
            out.write(len(encoded).to_bytes(8, "little") + encoded)
            for (name, tensor), expected in zip(tensors, shapes, strict=True):
                assert name == expected, f"{name} comes before {expected}"
                dense = tensor.detach().to("cpu", dtype).contiguous()
                out.write(dense.view(-1).view(torch.uint8).numpy().data)
    except OSError as error:
        raise BlobError(f"{file}: cannot be written: {error.strerror}") from error
