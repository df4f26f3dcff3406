"""Shared memory in which the scheduler's process leaves what a request's tokens passed through.

The rank gives each request a slot, whose number is part of the request's name; the scheduler fills
the slot in the order of positions and then says how far it came. What lies below that is final:
rejected draft tokens are never written.
"""

import math
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch

_Number = TypeVar("_Number", np.int32, np.int64)


class TapShape(msgspec.Struct, frozen=True, kw_only=True):
    slots: int
    positions: int
    # states per position; none if nothing is captured
    layers: int
    hidden: int
    dtype: str

    @property
    def state_bytes(self) -> int:
        width = self.layers * self.hidden * getattr(torch, self.dtype).itemsize
        return self.slots * self.positions * width

    @property
    def bytes(self) -> int:
        return self.slots * 8 + self.slots * self.positions * 8 + self.state_bytes


class Tap:
    def __init__(self, path: Path, shape: TapShape) -> None:
        """`path` is a file of at least `shape.bytes`; whoever maps it shares it."""
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), shape.bytes)
        slots, positions = shape.slots, shape.positions
        # how many positions of a slot are filled
        self.filled = self._array(np.int64, (slots,), 0)
        # of the pass that each position was fed to: how many requests ran, on whose weights
        self.sizes = self._array(np.int32, (slots, positions), slots * 8)
        self.versions = self._array(np.int32, (slots, positions), slots * (8 + 4 * positions))
        self.states = self._states(shape)

    @classmethod
    def create(cls, path: Path, shape: TapShape) -> "Tap":
        with path.open("xb") as file:
            file.truncate(shape.bytes)
        return cls(path, shape)

    def _array(
        self, kind: type[_Number], shape: tuple[int, ...], offset: int
    ) -> npt.NDArray[_Number]:
        count = math.prod(shape)
        return np.frombuffer(self._map, dtype=kind, count=count, offset=offset).reshape(shape)

    def _states(self, shape: TapShape) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, shape.dtype)
        sizes = (shape.slots, shape.positions, shape.layers, shape.hidden)
        if shape.state_bytes == 0:
            return torch.zeros(sizes, dtype=dtype)
        offset = shape.bytes - shape.state_bytes
        flat = torch.frombuffer(
            self._map, dtype=dtype, count=shape.state_bytes // dtype.itemsize, offset=offset
        )
        return flat.view(sizes)


class TapWriter:
    """The scheduler's side."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._holders: dict[int, str] = {}
        self._prompts: dict[int, Sequence[int]] = {}

    def write(
        self,
        name: str,
        prompt: Sequence[int],
        position: int,
        count: int,
        states: torch.Tensor | None,
        running: int,
        version: int,
    ) -> None:
        """`count` tokens of the request were fed, the first at `position`."""
        slot = slot_of(name)
        tap = self._tap
        if self._holders.get(slot) != name:
            self._begin(slot, name, prompt, position)
        end = min(position + count, tap.sizes.shape[1])
        tap.sizes[slot, position:end] = running
        tap.versions[slot, position:end] = version
        if states is not None:
            tap.states[slot, position:end] = states[: end - position]
        tap.filled[slot] = end

    def _begin(self, slot: int, name: str, prompt: Sequence[int], position: int) -> None:
        """What comes before `position` was computed for another request, and is copied."""
        tap = self._tap
        source = self._twin(prompt, position)
        tap.filled[slot] = 0
        tap.sizes[slot, :position] = 0
        if source is None:
            tap.states[slot, :position] = torch.nan
        elif source != slot:
            tap.states[slot, :position] = tap.states[source, :position]
        self._holders[slot] = name
        self._prompts[slot] = prompt

    def _twin(self, prompt: Sequence[int], positions: int) -> int | None:
        for slot, held in self._prompts.items():
            if self._tap.filled[slot] >= positions and held[:positions] == prompt[:positions]:
                return slot
        return None


def request_name(slot: int, salt: str, id: int) -> str:
    """No name begins with another one: SGLang aborts by beginnings."""
    return f"tlt-{slot}-{salt}-{id}."


def slot_of(name: str) -> int:
    return int(name.split("-")[1])
