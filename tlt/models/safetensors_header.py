"""Read the shapes in a safetensors file from its header, without torch."""

import json
from pathlib import Path

from tlt.errors import ConfigError

Shape = tuple[int, ...]


def read_shapes(file: Path) -> dict[str, Shape]:
    try:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(size))
        return {
            name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        }
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: no safetensors file") from error


def read_folder_shapes(folder: Path) -> dict[str, Shape]:
    """Return the shapes in all safetensors files of a model's folder."""
    shapes: dict[str, Shape] = {}
    for file in sorted(folder.glob("*.safetensors")):
        shapes |= read_shapes(file)
    return shapes
