"""What a drafter learns from: the states at some layers' entrances, kept by row and position.

They are written by the pass that decodes, as it goes by; nothing is computed for them.
"""

from collections.abc import Sequence

import torch

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
        """The number of layers stands for what follows the last one: the final norm's output."""
        self._data = torch.zeros(
            rows, positions, len(layers), config.hidden, dtype=dtype, device=device
        )
        self._layers = tuple(layers)
        self._flat = self._data.view(rows * positions, len(layers), config.hidden)
        self._kept = {layer: self._flat[:, place] for place, layer in enumerate(layers)}
        self._positions = positions

    @property
    def bytes(self) -> int:
        return self._data.nbytes

    @property
    def token(self) -> torch.Tensor:
        """One token's: [layers, hidden]."""
        return self._data[0, 0]

    def places(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rows * self._positions + positions

    def wants(self, layer: int) -> bool:
        return layer in self._kept

    def keep(self, layer: int, places: torch.Tensor, x: torch.Tensor) -> None:
        if (kept := self._kept.get(layer)) is not None:
            kept.index_copy_(0, places, x)

    def columns(self, layers: Sequence[int]) -> list[int]:
        """Which of the captured layers these are."""
        return [self._layers.index(layer) for layer in layers]

    def at(self, places: torch.Tensor, columns: Sequence[int]) -> torch.Tensor:
        """[places, columns, hidden]"""
        return torch.stack([self._flat[:, column].index_select(0, places) for column in columns], 1)

    def of(self, row: int, positions: int) -> torch.Tensor:
        """[positions, layers, hidden]: a view, overwritten when the row's slot is filled again."""
        return self._data[row, :positions]

    def copy(self, source: int, target: int, positions: int) -> None:
        self._data[target, :positions] = self._data[source, :positions]
