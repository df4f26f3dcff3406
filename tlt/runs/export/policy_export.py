"""Export a policy version, or a LoRA adapter, as a folder that other programs load."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors import safe_open

from tlt.blobs.blob_files import committed_blobs
from tlt.errors import ConfigError
from tlt.models.safetensors_io import stream_weights
from tlt.models.tokenizer import Tokenizer
from tlt.report import Ledger, StoredPolicy
from tlt.runs.export.new_folder import new_folder
from tlt.runs.export.policy_card import policy_card
from tlt.spec.config import JobSpec
from tlt.trainer.policy.model.lora_adapter import write_adapter_config


def export_adapter(run: Path, spec: JobSpec, stored: StoredPolicy, folder: Path) -> None:
    """Write the adapter of `stored`; its configuration names the spec's policy as its base."""
    if spec.policy.lora is None or stored.adapter is None:
        raise ConfigError(f"{run.name} trained all weights: it has no policy.lora, so no adapter")
    with new_folder(folder) as unfinished, committed_blobs(run) as blobs:
        weights = unfinished / "adapter_model.safetensors"
        shutil.copyfile(blobs.verify(stored.adapter), weights)
        with safe_open(weights, framework="pt") as tensors:
            names = list(tensors.keys())
        write_adapter_config(unfinished, spec.policy.lora, spec.policy, names)


ExportedDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".index.json")
# Transformers 5 and 4 have different names for it
_DTYPE_KEYS = ("dtype", "torch_dtype")


def export_policy(
    run: Path,
    ledger: Ledger,
    stored: StoredPolicy,
    folder: Path,
    dtype: ExportedDtype | None = None,
) -> None:
    """Copy the initial policy's folder, with the weights of `stored` in place of its own.

    They get the format of the initial policy if `dtype` is None.
    """
    initial = Path(ledger.spec.policy.path)
    config = _read_json(initial / "config.json")
    kind = dtype or declared_dtype(config)
    with new_folder(folder) as unfinished:
        for file in initial.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHT_FILES):
                shutil.copyfile(file, unfinished / file.name)
        _write_weights(run, stored, unfinished / "model.safetensors", _DTYPES[kind])
        key = next((key for key in _DTYPE_KEYS if key in config), "dtype")
        _write_json(unfinished / "config.json", {**config, key: kind})
        if not (unfinished / "generation_config.json").exists():
            generation = _generation_config(config, Tokenizer(str(initial)))
            _write_json(unfinished / "generation_config.json", generation)
        (unfinished / "README.md").write_text(policy_card(ledger, stored, kind))


def declared_dtype(config: dict[str, Any]) -> str:
    """Return the format that config.json declares; float32, which is trained in, if it is none."""
    declared = next((str(config[key]) for key in _DTYPE_KEYS if config.get(key)), "float32")
    return declared if declared in _DTYPES else "float32"


def _write_weights(run: Path, stored: StoredPolicy, file: Path, dtype: torch.dtype) -> None:
    with (
        committed_blobs(run) as blobs,
        safe_open(blobs.verify(stored.weights), framework="pt") as weights,
    ):
        names = list(weights.keys())
        shapes = {name: weights.get_slice(name).get_shape() for name in names}
        stream_weights(file, shapes, weights.get_tensor, dtype)


def _generation_config(config: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """End answers where those of rollouts ended."""
    others = ("bos_token_id", "pad_token_id")
    known = {key: config[key] for key in others if config.get(key) is not None}
    return {**known, "eos_token_id": sorted(tokenizer.stop_tokens())}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
