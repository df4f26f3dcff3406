"""Say how SGLang's ranks compute one pass, and share that among those of a tensor-parallel group.

Only the first rank measures and chooses. All ranks run the same passes in the same order, so one
small broadcast before each keeps them together; SGLang broadcasts the requests on the same group.
"""

from typing import Any

import msgspec
import torch
import torch.distributed as dist

# a longer message, which only proposals and texts need, takes a second broadcast
_SHORT = 256
_LENGTH_BYTES = 8


class KnownText(msgspec.Struct, frozen=True, array_like=True):
    """A row of the batch, and its text from the second token to the one that is read next."""

    row: int
    tokens: list[int]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    # drafts that each row verifies
    width: int = 0
    # True if the drafter's cache is kept up to date
    extends: bool = False
    # by row: n-grams of one length, to be verified instead of the drafter's proposals
    chains: list[list[int]] | None = None
    # rows whose part of the drafter's cache is rebuilt before
    rebuilt: list[KnownText] = []


class PlanSharing:
    """The broadcasts of a tensor-parallel group."""

    def __init__(self, group: Any) -> None:
        """Share within a group of SGLang's."""
        self._alone = group.world_size == 1
        self._source: int = group.ranks[0]
        self._group = group.cpu_group

    def send(self, plan: StepPlan) -> None:
        if self._alone:
            return
        text = msgspec.msgpack.encode(plan)
        message = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        self._broadcast(message[:_SHORT].ljust(_SHORT, b"\0"))
        if len(message) > _SHORT:
            self._broadcast(message[_SHORT:])

    def receive(self) -> StepPlan:
        message = self._broadcast(bytes(_SHORT))
        end = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES], "little")
        if end > _SHORT:
            message += self._broadcast(bytes(end - _SHORT))
        return msgspec.msgpack.decode(message[_LENGTH_BYTES:end], type=StepPlan)

    def _broadcast(self, message: bytes) -> bytes:
        shared = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        dist.broadcast(shared, src=self._source, group=self._group)
        return shared.numpy().tobytes()
