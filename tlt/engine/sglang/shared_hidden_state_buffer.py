"""The tap: shared memory in which SGLang's scheduler leaves the hidden states of requests.

The rank gives each request a slot, whose number is part of the request's name. The scheduler fills
the slot in the order of positions and then updates the count of filled ones. Filled positions are
final: rejected drafts are never written.
"""

import math
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch

_Number = TypeVar("_Number", np.int32, np.int64)


class TapShape(msgspec.Struct, frozen=True, kw_only=True):
    slots: int
    positions: int
    # states per position; 0 if nothing is captured
    layers: int
    hidden: int
    dtype: str

    @property
    def state_bytes(self) -> int:
        width = self.layers * self.hidden * getattr(torch, self.dtype).itemsize
        return self.slots * self.positions * width

    @property
    def bytes(self) -> int:
        return self.slots * 16 + self.slots * self.positions * 8 + self.state_bytes


class Tap:
    def __init__(self, path: Path, shape: TapShape) -> None:
        """Map a file of at least `shape.bytes`; all processes that map it share it."""
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), shape.bytes)
        slots, positions = shape.slots, shape.positions
        # by slot: how many positions are filled, and the serial number of the request
        self.filled = self._array(np.int64, (slots,), 0)
        self.holders = self._array(np.int64, (slots,), slots * 8)
        # by position: how many requests ran in its pass, and the policy version
        self.sizes = self._array(np.int32, (slots, positions), slots * 16)
        self.versions = self._array(np.int32, (slots, positions), slots * (16 + 4 * positions))
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


class RequestName(NamedTuple):
    """The name of a request in SGLang."""

    slot: int
    # only requests of equal salts share prefixes
    salt: str
    # unique in an engine
    serial: int

    def write(self) -> str:
        """Return a name that begins no other name, since SGLang aborts by prefix."""
        return f"tlt-{self.slot}-{self.salt}-{self.serial}."

    @classmethod
    def read(cls, text: str) -> "RequestName":
        _, slot, salt, serial = text.rstrip(".").split("-")
        return cls(int(slot), salt, int(serial))


class TapWriter:
    """Fill the tap's slots, in the scheduler's process."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._names: dict[int, RequestName] = {}
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
        """Record that `count` tokens of a request were fed, the first at `position`."""
        named, tap = RequestName.read(name), self._tap
        slot = named.slot
        if self._names.get(slot) != named:
            self._begin(named, prompt, position)
        end = min(position + count, tap.sizes.shape[1])
        tap.sizes[slot, position:end] = running
        tap.versions[slot, position:end] = version
        if states is not None:
            tap.states[slot, position:end] = states[: end - position]
        tap.filled[slot] = end

    def _begin(self, name: RequestName, prompt: Sequence[int], position: int) -> None:
        """Begin a slot; states before `position` are copied from the request that computed them."""
        tap, slot = self._tap, name.slot
        source = self._find_prefix(name.salt, prompt, position) if position else None
        tap.filled[slot] = 0
        tap.holders[slot] = name.serial
        tap.sizes[slot, :position] = 0
        if source is not None and source != slot:
            tap.states[slot, :position] = tap.states[source, :position]
        self._names[slot], self._prompts[slot] = name, prompt

    def _find_prefix(self, salt: str, prompt: Sequence[int], positions: int) -> int:
        for slot, held in self._prompts.items():
            shares = self._names[slot].salt == salt and self._tap.filled[slot] >= positions
            if shares and held[:positions] == prompt[:positions]:
                return slot
        raise LookupError("a prefix is shared with a request whose states are gone")
