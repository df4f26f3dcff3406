"""Which slot of the tap a request gets, and whose cached prompt it may share.

SGLang computes a shared prefix once, so its states are copied from whoever came first. A request
shares only with one whose slot still holds them, and which saw the same policy and drafter. That
they are still there when it begins follows from the order: slots are taken in the order in which
they were given back, and SGLang begins requests in the order in which they came.
"""

import os
from collections import deque
from itertools import count

from tlt.engine.sglang.hidden_state_tap import RequestName

Prompt = tuple[int, ...]


class TapSlotAllocator:
    def __init__(self, slots: int) -> None:
        self._free = deque(range(slots))
        # what lies in each slot, those that are free again included
        self._held: dict[int, tuple[Prompt, str, str]] = {}
        self._own = os.urandom(4).hex()
        self._salts = count()
        self._serials = count(int.from_bytes(os.urandom(5)) << 20)

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def take(self, prompt: Prompt, weights: str) -> RequestName:
        """`weights` says which ones the prompt is computed with."""
        slot = self._free.popleft()
        salt = self._shared(prompt, weights) or f"{self._own}.{next(self._salts)}"
        self._held[slot] = prompt, weights, salt
        return RequestName(slot, salt, next(self._serials))

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def _shared(self, prompt: Prompt, weights: str) -> str | None:
        for held, computed_with, salt in self._held.values():
            if held == prompt and computed_with == weights:
                return salt
        return None
