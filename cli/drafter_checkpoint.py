"""The files of a training that is not done, beside the folder that its drafter will have.

Each is whole or as it was before.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from safetensors.torch import load_file
from torch import Tensor

from tlt.errors import ConfigError
from tlt.models.drafter_folder import save_drafter
from tlt.models.eagle_drafter import Drafter
from tlt.models.safetensors_io import write_weights

_T = TypeVar("_T")
_PLAN = "plan.json"
_LEARNER = "learner.safetensors"


class Notes:
    def __init__(self, out: Path, plan: dict[str, Any]) -> None:
        self._out = out
        self._folder = out.with_name(f".{out.name}-training")
        if out.exists():
            raise ConfigError(f"{out}: exists already")
        begun = self.read(_PLAN, dict[str, Any])
        if begun is None:
            self.write(_PLAN, plan)
            return
        if odd := [key for key, value in plan.items() if begun.get(key) != value]:
            raise ConfigError(
                f"{self._folder}: a training that began with {odd[0]} {begun.get(odd[0])}, "
                f"not {plan[odd[0]]}; repeat its command, or remove that folder"
            )

    def read(self, name: str, kind: type[_T]) -> _T | None:
        file = self._folder / name
        if not file.is_file():
            return None
        try:
            return msgspec.json.decode(file.read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{file}: {error}") from error

    def write(self, name: str, value: Any) -> None:
        content = msgspec.json.encode(value)
        self._write(name, lambda file: file.write_bytes(content))

    def learner(self) -> dict[str, Tensor] | None:
        file = self._folder / _LEARNER
        return load_file(file) if file.is_file() else None

    def keep_learner(self, state: dict[str, Tensor]) -> None:
        self._write(_LEARNER, lambda file: write_weights(file, state))

    def finish(self, drafter: Drafter, updates: int) -> None:
        whole = self._folder / "drafter"
        try:
            save_drafter(drafter, whole, updates)
            os.rename(whole, self._out)
            shutil.rmtree(self._folder)
        except OSError as error:
            raise ConfigError(f"{self._out}: cannot be written: {error.strerror}") from error

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = self._folder / f"{name}.unfinished"
            write(unfinished)
            os.replace(unfinished, self._folder / name)
        except OSError as error:
            raise ConfigError(f"{self._folder}: cannot be written: {error.strerror}") from error
