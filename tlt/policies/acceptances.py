"""One acceptance for batches of any size, or one for each bucket of them."""

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Final

from tlt.policies.acceptance import Acceptance
from tlt.policies.strategy import bucket_of

# rows that what was seen with more answers counts for
_NEIGHBOUR = 8.0


class Pooled:
    def __init__(self, first: float) -> None:
        self._acceptance: Final = Acceptance(first)

    def take_after(self, other: "Pooled") -> None:
        self._acceptance.take_after(other._acceptance)

    def at(self, batch: int) -> Acceptance:
        return self._acceptance

    def observe(self, batch: int, reached: Sequence[int], accepted: Sequence[int]) -> None:
        self._acceptance.observe(reached, accepted)

    def fade(self, share: float, most: float = math.inf) -> None:
        self._acceptance.fade(share, most)


class ByBatch:
    """N-grams guess the better, the fewer answers still run: siblings side by side have little to
    copy from one another, and what still runs when most have ended has a lot."""

    def __init__(self, first: float, memory: float) -> None:
        """As `Acceptance` has them."""
        self._unseen: Final = Acceptance(first, memory)
        self._buckets: dict[int, Acceptance] = {}

    def at(self, batch: int) -> Acceptance:
        """To be read; of the next larger batches that were seen, or else of the next smaller."""
        bucket = bucket_of(batch)
        if bucket in self._buckets:
            return self._buckets[bucket]
        larger = [each for each in self._buckets if each > bucket]
        nearest = min(larger) if larger else max(self._buckets, default=None)
        return self._unseen if nearest is None else self._buckets[nearest]

    def observe(self, batch: int, reached: Sequence[int], accepted: Sequence[int]) -> None:
        bucket = bucket_of(batch)
        if bucket not in self._buckets:
            self._buckets[bucket] = deepcopy(self.at(batch))
            self._buckets[bucket].fade(1.0, most=_NEIGHBOUR)
        self._buckets[bucket].observe(reached, accepted)

    def fade(self, share: float, most: float = math.inf) -> None:
        for acceptance in self._buckets.values():
            acceptance.fade(share, most)
