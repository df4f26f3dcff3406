"""Keys and values by row and position, finite everywhere.

A masked position is multiplied by the soft-max's zero, and zero times NaN is NaN.
"""

import torch

from tlt.engine.native.decode_attention_kernels import CacheLayout
from tlt.models.decoder_spec import DecoderConfig


def release_storage(tensor: torch.Tensor) -> None:
    """Free the memory; the tensor and its views must not be read or written meanwhile."""
    tensor.untyped_storage().resize_(0)


def restore_storage(tensor: torch.Tensor) -> None:
    """Allocate the memory again, filled with zeros; its address may be another."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    tensor.zero_()


class KvCache:
    def __init__(
        self,
        config: DecoderConfig,
        rows: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.positions = positions
        self._heads = 2 * config.kv_heads
        # by head: first all keys, then all values
        self._data = torch.zeros(
            config.layers, rows, self._heads, positions, config.head_dim, dtype=dtype, device=device
        )
        self.layers = self._data.view(config.layers, -1, config.head_dim).unbind(0)
        self._kv_heads = config.kv_heads
        self.layout = self._find_layout()
        self._head_offsets = torch.arange(self._heads, device=device) * positions

    @property
    def bytes(self) -> int:
        return self._data.untyped_storage().nbytes() + self._head_offsets.nbytes

    @property
    def device(self) -> torch.device:
        return self._data.device

    @property
    def dtype(self) -> torch.dtype:
        return self._data.dtype

    def release(self) -> None:
        """Free the entries; nothing may be read or written before `restore`."""
        release_storage(self._data)

    def restore(self) -> None:
        restore_storage(self._data)
        self.layout = self._find_layout()

    def _find_layout(self) -> CacheLayout:
        addresses = [layer.data_ptr() for layer in self.layers]
        return CacheLayout(addresses, self._kv_heads, self.positions)

    def addresses(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the indices in `layers[i]` of these positions' entries, head by head."""
        first = rows * (self._heads * self.positions) + positions
        return (first[:, None] + self._head_offsets).view(-1)

    def views(
        self, rows: slice, width: int
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Return the keys and the values, by layer, of these rows' first positions."""
        keys, values = self._data[:, rows, :, :width].chunk(2, dim=2)
        return keys.unbind(0), values.unbind(0)

    def copy(self, source: int, target: int, positions: int) -> None:
        self._data[:, target, :, :positions] = self._data[:, source, :, :positions]
