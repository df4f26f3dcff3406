"""The plan and the files of an unfinished training, in a hidden folder beside the future drafter.

Each file is replaced as a whole, so that a training that is killed continues from its last write.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from safetensors.torch import load_file
from torch import Tensor

from tlt.errors import ConfigError
from tlt.models.drafter_folder import save_drafter
from tlt.models.eagle_drafter import Drafter
from tlt.models.safetensors_io import write_weights


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    file: str
    # True if the file has answers; otherwise the policy generates them
    answers_given: bool
    layout: Literal["eagle", "eagle3"]
    start: str | None
    tokens: int
    samples: int
    held_out: int
    max_context: int
    slots: int
    prompt_key: str
    answer_key: str
    chat_template: bool
    system_prompt: str | None
    seed: int


_T = TypeVar("_T")
_PLAN = "plan.json"
_LEARNER = "learner.safetensors"


class TrainingFiles:
    def __init__(self, out: Path, plan: TrainingPlan) -> None:
        self._out = out
        self._folder = out.with_name(f".{out.name}-training")
        if out.exists():
            raise ConfigError(f"{out}: exists already")
        wanted: dict[str, Any] = msgspec.to_builtins(plan)
        begun = self.read(_PLAN, dict[str, Any])
        if begun is None:
            self.write(_PLAN, wanted)
            return
        if odd := [key for key, value in wanted.items() if begun.get(key) != value]:
            raise ConfigError(
                f"{self._folder}: a training that began with {odd[0]} {begun.get(odd[0])}, "
                f"not {wanted[odd[0]]}; repeat its command, or remove that folder"
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
        self._replace(name, lambda file: file.write_bytes(content))

    def read_learner(self) -> dict[str, Tensor] | None:
        file = self._folder / _LEARNER
        return load_file(file) if file.is_file() else None

    def write_learner(self, state: dict[str, Tensor]) -> None:
        self._replace(_LEARNER, lambda file: write_weights(file, state))

    def finish(self, drafter: Drafter, updates: int, policy_head: Tensor) -> None:
        """Move the finished drafter to its folder and remove the training's files."""
        finished = self._folder / "drafter"
        try:
            save_drafter(drafter, finished, updates, policy_head)
            os.rename(finished, self._out)
            shutil.rmtree(self._folder)
        except OSError as error:
            raise ConfigError(f"{self._out}: cannot be written: {error.strerror}") from error

    def _replace(self, name: str, write: Callable[[Path], object]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = self._folder / f"{name}.unfinished"
            write(unfinished)
            os.replace(unfinished, self._folder / name)
        except OSError as error:
            raise ConfigError(f"{self._folder}: cannot be written: {error.strerror}") from error
