"""Read the shapes in a safetensors file from its header, without torch."""

import json
from collections.abc import Callable
from pathlib import Path

from tlt.errors import ConfigError

Shape = tuple[int, ...]


def read_shapes(file: Path) -> dict[str, Shape]:
    def read(offset: int, size: int) -> bytes:
        with file.open("rb") as content:
            content.seek(offset)
            return content.read(size)

    try:
        return parse_shapes(read, str(file))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error


def parse_shapes(read: Callable[[int, int], bytes], name: str) -> dict[str, Shape]:
    """Return the shapes in a file of which `read` returns bytes from an offset on."""
    try:
        header = json.loads(read(8, int.from_bytes(read(0, 8), "little")))
        return {
            name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{name}: no safetensors file") from error


def read_folder_shapes(folder: Path) -> dict[str, Shape]:
    """Return the shapes in all safetensors files of a model's folder."""
    shapes: dict[str, Shape] = {}
    for file in sorted(folder.glob("*.safetensors")):
        shapes |= read_shapes(file)
    return shapes
