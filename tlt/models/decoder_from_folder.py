"""Read a model folder completely, as Transformers would compute it, or refuse it."""

import math
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from tlt.base.id_types import FileName
from tlt.errors import ConfigError, UnsupportedModel
from tlt.models.config_json import read_config, read_json, unsupported
from tlt.models.decoder_spec import (
    EMBEDDING,
    HEAD,
    Decoder,
    describe_mismatch,
    weight_shapes,
)

_FORMATS = {"F64", "F32", "F16", "BF16"}
# a buffer in old checkpoints; it follows from rope_theta
_DERIVED_BUFFER = "rotary_emb.inv_freq"


class _Index(msgspec.Struct):
    weight_map: dict[str, FileName]


def load_decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = read_config(folder)
    weights: dict[str, torch.Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    expected = weight_shapes(config)
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    if name.endswith(_DERIVED_BUFFER):
                        continue
                    stored = tensors.get_slice(name)
                    shapes[name] = tuple(stored.get_shape())
                    if stored.get_dtype() not in _FORMATS:
                        raise unsupported(folder, f"{name} is stored as {stored.get_dtype()}")
                    if name in expected:
                        weights[name] = tensors.get_tensor(name).to(dtype)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: cannot be read as safetensors: {error}") from error
    if (complaint := describe_mismatch(config, shapes)) is not None:
        raise UnsupportedModel(f"{folder}: {complaint}")
    return Decoder(config=config, weights=weights)


def load_embedding_and_head(
    folder: Path, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read only the weights that a drafter shares; they are one tensor if the model ties them."""
    found: dict[str, torch.Tensor] = {}
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in {EMBEDDING, HEAD}.intersection(tensors.keys()):
                found[name] = tensors.get_tensor(name).to(device, dtype)
    embedding = found[EMBEDDING]
    return embedding, embedding if read_config(folder).tied else found[HEAD]


def count_weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Return the size of a model's weights in this precision."""
    shapes = weight_shapes(read_config(folder)).values()
    return sum(math.prod(shape) for shape in shapes) * dtype.itemsize


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ConfigError(f"{folder}: holds neither {single.name} nor {index.name}")
    names = sorted(set(read_json(index, _Index).weight_map.values()))
    for name in names:
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: {index.name} names {name}, which is missing")
    return [folder / name for name in names]
