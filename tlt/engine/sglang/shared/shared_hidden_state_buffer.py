"""The tap: shared memory in which SGLang's scheduler leaves tokens, origins and hidden states.

The rank gives each request a slot, whose number is part of the request's name. The scheduler fills
the slot in the order of positions and then updates the count of filled ones. Filled positions are
final: rejected drafts are never written.
"""

import math
import mmap
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch

_Number = TypeVar("_Number", np.int32, np.int64)

# how a token came about
PLAIN, ACCEPTED, CORRECTED = range(3)
# in the column of drafters
NO_DRAFTER = -1
# columns of one number per position, and of one number per slot
_COLUMNS, _PER_SLOT = 5, 2
_ALIGNMENT = 64


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
    def state_offset(self) -> int:
        numbers = self.slots * (8 * _PER_SLOT + 4 * _COLUMNS * self.positions)
        return -(-numbers // _ALIGNMENT) * _ALIGNMENT

    @property
    def bytes(self) -> int:
        return self.state_offset + self.state_bytes


class Tap:
    def __init__(self, path: Path, shape: TapShape) -> None:
        """Map a file of at least `shape.bytes`; all processes that map it share it."""
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), shape.bytes)
        slots, positions = shape.slots, shape.positions
        # by slot: how many positions are filled, and the serial number of the request
        self.filled = self._array(np.int64, (slots,), 0)
        self.holders = self._array(np.int64, (slots,), slots * 8)
        columns = self._array(np.int32, (_COLUMNS, slots, positions), slots * 8 * _PER_SLOT)
        # by position: how many requests ran in its pass, and the policy version
        self.sizes, self.versions = columns[0], columns[1]
        # by position: the token that its pass gained, how, and the drafter that proposed
        self.tokens, self.origins, self.drafters = columns[2], columns[3], columns[4]
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
        count = shape.state_bytes // dtype.itemsize
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=shape.state_offset)
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
