"""All tensors by row and position: one row per slot, then the rows of prefilled prompts."""

from collections.abc import Sequence

import torch

from tlt.engine.native.captured_hidden_states import CapturedStates
from tlt.engine.native.kv_cache import KvCache
from tlt.models.decoder_spec import DecoderConfig
from tlt.models.float32_product import wide


def count_slot_bytes(
    config: DecoderConfig, rows: int, positions: int, captured: int, dtype: torch.dtype
) -> int:
    """Return what `SlotTensors` of this shape allocate, with `captured` states by position."""
    entries = config.layers * 2 * config.kv_heads * config.head_dim + captured * config.hidden
    token, logprob, offsets = 8, wide(dtype).itemsize, 8 * 2 * config.kv_heads
    return rows * positions * (entries * dtype.itemsize + token + logprob) + offsets


class SlotTensors:
    def __init__(
        self,
        config: DecoderConfig,
        rows: int,
        positions: int,
        captured: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def table(kind: torch.dtype) -> torch.Tensor:
            return torch.zeros(rows, positions, dtype=kind, device=device)

        self.positions = positions
        self.cache = KvCache(config, rows, positions, dtype, device)
        self.states = CapturedStates(config, captured, rows, positions, dtype, device)
        self.tokens = table(torch.long)
        self.logprobs = table(wide(dtype))

    @property
    def bytes(self) -> int:
        parts = (self.cache.bytes, self.states.bytes, self.tokens.nbytes, self.logprobs.nbytes)
        return sum(parts)

    def release(self) -> None:
        """Free the cache and the states until `restore`."""
        self.cache.release()
        self.states.release()

    def restore(self) -> None:
        self.cache.restore()
        self.states.restore()

    def flat_indices(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the indices of these positions in flat views of tokens, log-probs and states."""
        return rows * self.positions + positions

    def copy(self, source: int, target: int, positions: int) -> None:
        self.cache.copy(source, target, positions)
        self.states.copy(source, target, positions)
        self.tokens[target, :positions] = self.tokens[source, :positions]
        self.logprobs[target, :positions] = self.logprobs[source, :positions]
