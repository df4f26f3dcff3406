"""Export a policy version as a folder that Transformers and SGLang load."""

import json
import shutil
from pathlib import Path

from tlt.blobs import Blobs
from tlt.config import JobSpec
from tlt.export.new_folder import new_folder
from tlt.report import StoredPolicy


def export_policy(run: Path, spec: JobSpec, stored: StoredPolicy, folder: Path) -> None:
    """Copy the initial policy's folder with the weights of `stored` in place of its own."""
    with new_folder(folder) as unfinished:
        for file in Path(spec.policy.path).iterdir():
            if file.is_file() and not _holds_weights(file):
                shutil.copyfile(file, unfinished / file.name)
        blobs = Blobs(run / "blobs", run / "blobs")
        shutil.copyfile(blobs.verify(stored.weights), unfinished / "model.safetensors")
        _set_dtype(unfinished / "config.json")


def _holds_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt") or file.name.endswith(".index.json")


def _set_dtype(config: Path) -> None:
    """Declare fp32, which the trainer's weights have, whatever the initial folder declared."""
    content = json.loads(config.read_text())
    content.pop("torch_dtype", None)
    content["dtype"] = "float32"
    config.write_text(json.dumps(content, indent=2) + "\n")
