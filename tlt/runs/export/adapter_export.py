"""Export a LoRA adapter as a folder that peft loads onto the policy it was trained with."""

import shutil
from pathlib import Path

from safetensors import safe_open

from tlt.blobs.blob_files import committed_blobs
from tlt.errors import ConfigError
from tlt.report import StoredPolicy
from tlt.runs.export.new_folder import new_folder
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
        write_adapter_config(unfinished, spec.policy.lora, spec.policy.path, names)
