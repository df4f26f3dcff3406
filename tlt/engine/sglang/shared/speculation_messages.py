"""Messages between a rank and the speculating worker in its SGLang scheduler."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from tlt.base.id_types import DrafterVersion
from tlt.protocol.shared_values import StrategyTally


class UseDrafter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The drafter's weights in SGLang are those of this version; None forbids proposing."""

    version: DrafterVersion | None


class NotePolicySwap(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The policy has new weights."""


class IndexAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Another engine decoded this answer."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


class AllowSpeculation(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode without drafts while speculation isn't allowed."""

    allowed: bool


class TalliesTaken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report what each strategy decoded since the last message."""

    tallies: tuple[StrategyTally, ...]


ToScheduler = UseDrafter | NotePolicySwap | IndexAnswer | AllowSpeculation
FromScheduler = TalliesTaken


class ControlPort(Protocol):
    """The scheduler's end of the messages; no call waits for the rank."""

    def send(self, message: FromScheduler) -> None: ...

    def flush(self) -> None:
        """Send what earlier calls couldn't."""
        ...

    def receive(self) -> Sequence[ToScheduler]:
        """Return the messages that have arrived."""
        ...
