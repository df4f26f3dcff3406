"""Share captured hidden states in files of shared memory, so that ranks of one host skip prefills.

A file appears under its name only when it is whole. A rank that has mapped a file can read it
even after the owner has deleted it.
"""

import contextlib
import os
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from tlt.base.id_types import Member, PromptIndex, Step
from tlt.blobs.blob_files import free_bytes

Name = tuple[Step, PromptIndex, Member]
_PARTIAL = "partial"
# share of the shared memory that stays free for weights and rollouts, which jobs need
_LEFT_FREE = 0.25


class HiddenStateStore:
    """The states that this rank has written, and access to those of other ranks."""

    def __init__(
        self, folder: Path, example: torch.Tensor, reserved_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        """Take one token's states as an example; `reserved_bytes` of shared memory stay free."""
        self._folder = folder
        self._reserved_bytes = reserved_bytes
        self._example = example
        self._own: dict[Name, set[str]] = {}

    @property
    def token_bytes(self) -> int:
        """Return the size of one token's states."""
        return self._example.nbytes

    def put(self, name: Name, states: torch.Tensor, *, partial: bool = False) -> torch.Tensor:
        """Return a copy that other ranks find, or a private one if there is no room."""
        file = _file(name, partial)
        try:
            if not self._has_room(states.nbytes):
                return states.to("cpu", copy=True)
            kept = self._write(file, states)
        except OSError:
            return states.to("cpu", copy=True)
        self._own.setdefault(name, set()).add(file)
        if not partial:
            self._remove(name, _file(name, partial=True))
        return kept

    def take(self, name: Name, tokens: int) -> torch.Tensor | None:
        """Return the states of an answer's first tokens, if a rank of this host wrote them."""
        for partial in (False, True):
            with contextlib.suppress(RuntimeError):  # no such file, or a shorter one
                return self._mapped(self._folder / _file(name, partial), tokens, shared=False)
        return None

    def keep_only(self, names: Collection[Name]) -> None:
        """Delete this rank's other files, and those of partial answers."""
        for name in list(self._own):
            if name not in names:
                self.remove(name)
            else:
                self._remove(name, _file(name, partial=True))

    def forget_before(self, step: Step) -> None:
        """Delete all ranks' files of earlier steps: a rank that died leaves its files behind."""
        with contextlib.suppress(FileNotFoundError):  # before the first file, and after the job
            for file in self._folder.iterdir():
                if int(file.name.partition(".")[0]) < step:
                    file.unlink(missing_ok=True)

    def remove(self, name: Name) -> None:
        """Delete this rank's files of an answer."""
        for file in list(self._own.get(name, ())):
            self._remove(name, file)
        self._own.pop(name, None)

    def _remove(self, name: Name, file: str) -> None:
        if file in self._own.get(name, ()):
            self._own[name].discard(file)
            (self._folder / file).unlink(missing_ok=True)

    def _has_room(self, size: int) -> bool:
        """Return False if weights need the room: a job can do without shared states."""
        self._folder.mkdir(parents=True, exist_ok=True)
        whole = os.statvfs(self._folder)
        leave = max(self._reserved_bytes(), _LEFT_FREE * whole.f_blocks * whole.f_frsize)
        return free_bytes(self._folder) - size >= leave

    def _write(self, file: str, states: torch.Tensor) -> torch.Tensor:
        # other ranks may write the same name
        unfinished = f"{self._folder}/{file}.unfinished-{os.getpid()}"
        handle = os.open(unfinished, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        try:
            whole = states.detach().cpu().contiguous().view(-1).view(torch.uint8)
            rest = whole.numpy().data
            # not into mapped memory: a page for which there is no room would end this process
            while rest:
                rest = rest[os.write(handle, rest) :]
            kept = self._mapped(Path(unfinished), len(states), shared=True)
            os.replace(unfinished, self._folder / file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise
        finally:
            os.close(handle)
        return kept

    def _mapped(self, file: Path, tokens: int, *, shared: bool) -> torch.Tensor:
        numbers = tokens * self._example.numel()
        flat = torch.from_file(str(file), shared=shared, size=numbers, dtype=self._example.dtype)
        return flat.view(tokens, *self._example.shape)


def _file(name: Name, partial: bool) -> str:
    step, prompt, member = name
    return f"{step}.{prompt}.{member}" + (f".{_PARTIAL}" if partial else "")
