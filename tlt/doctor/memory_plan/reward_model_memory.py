"""Count what a reward model takes of the device that it shares with a worker."""

from collections.abc import Iterator

import msgspec

from tlt.doctor.memory_plan.memory_items import Item

# an estimate, not measured by TLT: of the layer that is computed, the states and their norm, the
# queries, the attention's output; gate, up and their product
_HIDDEN, _INTERMEDIATE = 4, 3


class RewardModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    weights: int
    # bytes of a number
    width: int
    hidden: int
    intermediate: int
    batch_tokens: int
    # processes that hold it
    copies: int = 1

    def items(self, context_bytes: int) -> Iterator[Item]:
        """Yield what its processes hold on a device where each has a context of this size."""
        states = _HIDDEN * self.hidden + _INTERMEDIATE * self.intermediate
        each = self.width * (self.weights + states * self.batch_tokens) + context_bytes
        yield Item(
            name="reward model",
            bytes=self.copies * each,
            note=f"on one device alone, {self.device}: {self.weights / 1e9:.3g} billion weights"
            f" in {self.width} B, and a pass of {self.batch_tokens} tokens",
        )
