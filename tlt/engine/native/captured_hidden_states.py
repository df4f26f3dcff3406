"""Hidden states at the entrances of some layers, kept by row and position, for the drafter.

The decoding pass writes them; nothing but the last layer's norm is computed for them. What this
takes is measured, because a job without speculation doesn't need it.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from tlt.engine.native.kv_cache import release_storage, restore_storage
from tlt.models.decoder_spec import DecoderConfig


class CapturedStates:
    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[int],
        rows: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Capture at these layers' entrances; `config.layers` means the final norm's output."""
        self._data = torch.zeros(
            rows, positions, len(layers), config.hidden, dtype=dtype, device=device
        )
        self.layers = tuple(layers)
        # time that keeping states has taken so far; on a GPU, that of its launches
        self.seconds = 0.0
        self._flat = self._data.view(rows * positions, len(layers), config.hidden)
        self._columns = {layer: self._flat[:, column] for column, layer in enumerate(layers)}
        # empty while nobody reads states
        self._kept = self._columns
        # how often keeping was begun: what was cached before has no states
        self.beginnings = 0

    @property
    def bytes(self) -> int:
        return self._data.untyped_storage().nbytes()

    def release(self) -> None:
        """Free all states; nothing may be read or kept before `restore`."""
        release_storage(self._data)

    def restore(self) -> None:
        restore_storage(self._data)

    @property
    def token(self) -> torch.Tensor:
        """Return the states of one token: [layers, hidden]."""
        return self._data[0, 0]

    def enable(self, enabled: bool) -> None:
        """Keep states from the next pass on, or don't."""
        if enabled and not self._kept:
            self.beginnings += 1
        self._kept = self._columns if enabled else {}

    def keep(self, layer: int, indices: torch.Tensor, x: torch.Tensor) -> None:
        """Store a layer's states at flat indices, if the layer is captured."""
        if (kept := self._kept.get(layer)) is not None:
            began = perf_counter()
            kept.index_copy_(0, indices, x)
            self.seconds += perf_counter() - began

    def keep_computed(
        self, layer: int, indices: torch.Tensor, compute: Callable[[], torch.Tensor]
    ) -> None:
        """Compute and store a layer's states that nothing else needs, if it is captured."""
        if layer in self._kept:
            began = perf_counter()
            self._kept[layer].index_copy_(0, indices, compute())
            self.seconds += perf_counter() - began

    def columns(self, layers: Sequence[int]) -> list[int]:
        """Return the index of each layer among the captured ones."""
        return [self.layers.index(layer) for layer in layers]

    def at(self, indices: torch.Tensor, columns: Sequence[int]) -> torch.Tensor:
        """Return the states at flat indices: [indices, columns, hidden]."""
        parts = [self._flat[:, column].index_select(0, indices) for column in columns]
        return torch.stack(parts, 1)

    def of(self, row: int, positions: int) -> torch.Tensor:
        """Return a view [positions, layers, hidden], which the slot's next request overwrites."""
        return self._data[row, :positions]

    def copy(self, source: int, target: int, positions: int) -> None:
        self._data[target, :positions] = self._data[source, :positions]
