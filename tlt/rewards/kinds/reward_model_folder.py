"""Refuse a reward model's folder by its config.json, before its weights are loaded."""

import json
from pathlib import Path
from typing import Any

from tlt.errors import ConfigError
from tlt.spec.reward import RewardSpec

_CLASSIFIER = "ForSequenceClassification"
# what Transformers takes where config.json names no labels
_LABELS = 2


def read_folder(spec: RewardSpec) -> dict[str, Any]:
    """Return its config.json; raise ConfigError unless it is a sequence classifier of one label."""
    folder = Path(spec.path or "")
    config = _read_config(folder)
    names = config.get("architectures") or ["a model without a class"]
    if not any(str(name).endswith(_CLASSIFIER) for name in names):
        kind = ", ".join(map(str, names))
        wrong = f"{kind} generates text" if "CausalLM" in kind else f"it holds {kind}"
        raise ConfigError(f"reward.path: {folder}: {wrong}; a reward model is a …{_CLASSIFIER}")
    labels = config.get("num_labels") or len(config.get("id2label") or range(_LABELS))
    if labels != 1:
        raise ConfigError(
            f"reward.path: {folder}: its model has {labels} labels, and a reward model has one"
        )
    return config


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ConfigError(f"reward.path: {folder}: no such folder")
    file = folder / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"reward.path: {file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"reward.path: {file}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"reward.path: {file}: it holds no object")
    return config
