"""Captured states in files of shared memory: who learns on the same host need not read the answer.

A file appears under its name only when it is whole. Who has mapped one keeps what is in it, also
after its owner has let go of it.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from tlt.blobs import free_bytes
from tlt.ids import Member, PromptIndex, Step

Name = tuple[Step, PromptIndex, Member]
_GROWING = "growing"
# of the shared memory, for what jobs cannot do without
_LEFT_FREE = 0.25


class HiddenStateStore:
    def __init__(
        self, folder: Path, like: torch.Tensor, leave: Callable[[], int] = lambda: 0
    ) -> None:
        """`like`: one token's states; `leave`: bytes of shared memory that stay free at least."""
        self._folder = folder
        self._leave = leave
        self._like = like
        self._own: dict[Name, set[str]] = {}

    @property
    def token_bytes(self) -> int:
        return self._like.nbytes

    def put(self, name: Name, states: torch.Tensor, *, growing: bool = False) -> torch.Tensor:
        """A copy, which others find; without room for that, one of its own."""
        file = _file(name, growing)
        try:
            if not self._has_room(states.nbytes):
                return states.to("cpu", copy=True)
            kept = self._write(file, states)
        except OSError:
            return states.to("cpu", copy=True)
        self._own.setdefault(name, set()).add(file)
        if not growing:
            self._remove(name, _file(name, growing=True))
        return kept

    def take(self, name: Name, tokens: int) -> torch.Tensor | None:
        """The states of the first so many of its tokens."""
        for growing in (False, True):
            with contextlib.suppress(RuntimeError):  # it is not there, or not yet so long
                return self._mapped(self._folder / _file(name, growing), tokens, shared=False)
        return None

    def keep_only(self, names: Collection[Name]) -> None:
        """Of what this rank has put here, and no growing answer."""
        for name in list(self._own):
            if name not in names:
                self.remove(name)
            else:
                self._remove(name, _file(name, growing=True))

    def forget_before(self, step: Step) -> None:
        """Whoever put it here: a rank that died takes nothing away."""
        with contextlib.suppress(FileNotFoundError):  # nothing is there yet, or the job has ended
            for file in self._folder.iterdir():
                if int(file.name.partition(".")[0]) < step:
                    file.unlink(missing_ok=True)

    def remove(self, name: Name) -> None:
        for file in list(self._own.get(name, ())):
            self._remove(name, file)
        self._own.pop(name, None)

    def _remove(self, name: Name, file: str) -> None:
        if file in self._own.get(name, ()):
            self._own[name].discard(file)
            (self._folder / file).unlink(missing_ok=True)

    def _has_room(self, size: int) -> bool:
        """Weights need some, too, and a job can do without states but not without those."""
        self._folder.mkdir(parents=True, exist_ok=True)
        whole = os.statvfs(self._folder)
        leave = max(self._leave(), _LEFT_FREE * whole.f_blocks * whole.f_frsize)
        return free_bytes(self._folder) - size >= leave

    def _write(self, file: str, states: torch.Tensor) -> torch.Tensor:
        handle, unfinished = tempfile.mkstemp(dir=self._folder, prefix=f"{file}.unfinished-")
        try:
            # a mapped page that there is no room for would end this process
            os.posix_fallocate(handle, 0, states.nbytes)
            kept = self._mapped(Path(unfinished), len(states), shared=True)
            kept.copy_(states)
            os.replace(unfinished, self._folder / file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise
        finally:
            os.close(handle)
        return kept

    def _mapped(self, file: Path, tokens: int, *, shared: bool) -> torch.Tensor:
        numbers = tokens * self._like.numel()
        flat = torch.from_file(str(file), shared=shared, size=numbers, dtype=self._like.dtype)
        return flat.view(tokens, *self._like.shape)


def _file(name: Name, growing: bool) -> str:
    step, prompt, member = name
    return f"{step}.{prompt}.{member}" + (f".{_GROWING}" if growing else "")
