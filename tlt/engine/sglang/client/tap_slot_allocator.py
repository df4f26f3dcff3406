"""Assign tap slots to requests, and decide with which requests they share a cached prompt.

SGLang computes a shared prefix once, so its states are copied from the request that came first. A
request shares only with one whose slot still holds the states, under the same policy and drafter.
The states are still there when it begins, because slots are reused in the order in which they were
given back, and SGLang begins requests in the order in which they came.
"""

import os
from collections import deque
from itertools import count

from tlt.engine.sglang.shared.shared_hidden_state_buffer import RequestName

Prompt = tuple[int, ...]


class TapSlotAllocator:
    def __init__(self, slots: int) -> None:
        self._free = deque(range(slots))
        # by slot, free ones included: prompt, weights and salt of the last request
        self._held: dict[int, tuple[Prompt, str, str]] = {}
        self._prefix = os.urandom(4).hex()
        self._salts = count()
        self._serials = count(int.from_bytes(os.urandom(5)) << 20)

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def take(self, prompt: Prompt, weights: str) -> RequestName:
        """Name a request whose prompt is computed with these `weights`."""
        slot = self._free.popleft()
        salt = self._shared_salt(prompt, weights) or f"{self._prefix}.{next(self._salts)}"
        self._held[slot] = prompt, weights, salt
        return RequestName(slot, salt, next(self._serials))

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def _shared_salt(self, prompt: Prompt, weights: str) -> str | None:
        for held, computed_with, salt in self._held.values():
            if held == prompt and computed_with == weights:
                return salt
        return None
