"""All tensors by row and position: one row per slot, then the rows of prefilled prompts."""

from collections.abc import Sequence

import torch

from tlt.engine.native.captured_hidden_states import CapturedStates
from tlt.engine.native.kv_cache import KvCache
from tlt.models.decoder_spec import DecoderConfig


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
        self.logprobs = table(torch.promote_types(dtype, torch.float32))

    @property
    def bytes(self) -> int:
        parts = (self.cache.bytes, self.states.bytes, self.tokens.nbytes, self.logprobs.nbytes)
        return sum(parts)

    def flat_indices(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the indices of these positions in flat views of tokens, log-probs and states."""
        return rows * self.positions + positions

    def copy(self, source: int, target: int, positions: int) -> None:
        self.cache.copy(source, target, positions)
        self.states.copy(source, target, positions)
        self.tokens[target, :positions] = self.tokens[source, :positions]
        self.logprobs[target, :positions] = self.logprobs[source, :positions]
