"""Create a folder that appears complete or not at all."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tlt.errors import ConfigError


@contextmanager
def new_folder(folder: Path) -> Generator[Path]:
    """Yield a hidden folder to write to, which is renamed to `folder` at the end."""
    if folder.exists():
        raise ConfigError(f"{folder}: exists already")
    unfinished = folder.with_name(f".{folder.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        os.rename(unfinished, folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
