"""One acceptance for batches of any size, or one for each bucket of them."""

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Final

from tlt.policies.speculation.acceptance_model import AcceptanceModel
from tlt.policies.speculation.strategy_policy import bucket_of

# rows that what was seen with more answers counts for, or with fewer
_NEIGHBOUR = 8.0


class PooledAcceptance:
    def __init__(self, first: float) -> None:
        self._acceptance: Final = AcceptanceModel(first)

    def take_after(self, other: "PooledAcceptance") -> None:
        self._acceptance.take_after(other._acceptance)

    def gains(self, batch: int, depth: int) -> Sequence[float]:
        return self._acceptance.gains(depth)

    def doubt(self, batch: int, depth: int) -> float:
        return self._acceptance.doubt(depth)

    def observe(self, batch: int, reached: Sequence[int], accepted: Sequence[int]) -> None:
        self._acceptance.observe(reached, accepted)

    def fade(self, share: float, most: float = math.inf) -> None:
        self._acceptance.fade(share, most)


class AcceptanceByBatchSize:
    """N-grams guess the better, the fewer answers still run: siblings side by side have little to
    copy from one another, and what still runs when most have ended has a lot."""

    def __init__(self, first: float, memory: float) -> None:
        """As `Acceptance` has them."""
        self._unseen: Final = AcceptanceModel(first, memory)
        self._buckets: dict[int, AcceptanceModel] = {}

    def gains(self, batch: int, depth: int) -> Sequence[float]:
        bucket = bucket_of(batch)
        return (self._buckets.get(bucket) or self._nearest(bucket)).gains(depth)

    def doubt(self, batch: int, depth: int) -> float:
        bucket = bucket_of(batch)
        return (self._buckets.get(bucket) or self._as_nearest(bucket)).doubt(depth)

    def observe(self, batch: int, reached: Sequence[int], accepted: Sequence[int]) -> None:
        bucket = bucket_of(batch)
        if bucket not in self._buckets:
            self._buckets[bucket] = self._as_nearest(bucket)
        self._buckets[bucket].observe(reached, accepted)

    def fade(self, share: float, most: float = math.inf) -> None:
        for acceptance in self._buckets.values():
            acceptance.fade(share, most)

    def _nearest(self, bucket: int) -> AcceptanceModel:
        """Of the next larger batches that were seen, or else of the next smaller."""
        larger = [each for each in self._buckets if each > bucket]
        nearest = min(larger) if larger else max(self._buckets, default=None)
        return self._unseen if nearest is None else self._buckets[nearest]

    def _as_nearest(self, bucket: int) -> AcceptanceModel:
        guessed = deepcopy(self._nearest(bucket))
        guessed.fade(1.0, most=_NEIGHBOUR)
        return guessed
