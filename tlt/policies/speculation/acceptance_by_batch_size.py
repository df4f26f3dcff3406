"""Estimate acceptance with one model for all batch sizes, or with one per bucket of them."""

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Final

from tlt.policies.speculation.acceptance_model import AcceptanceModel
from tlt.policies.speculation.strategy_policy import bucket_of

# rows that a neighbouring bucket's data counts for
_NEIGHBOUR_ROWS = 8.0


class PooledAcceptance:
    """Use one model for all batch sizes."""

    def __init__(self, first: float) -> None:
        self._model: Final = AcceptanceModel(first)
        self.discount = self._model.discount

    def link(self, other: "PooledAcceptance") -> None:
        self._model.link(other._model)

    def expected_accepts(self, batch: int, depth: int) -> Sequence[float]:
        return self._model.expected_accepts(depth)

    def uncertainty(self, batch: int, depth: int) -> float:
        return self._model.uncertainty(depth)

    def observe(self, batch: int, reached: Sequence[int], accepted: Sequence[int]) -> None:
        self._model.observe(reached, accepted)


class AcceptanceByBatchSize:
    """Use one model per bucket of batch sizes, for n-grams.

    N-grams guess better the fewer answers still run: siblings that run side by side have little to
    copy from one another, while the last ones can copy from all that have ended.
    """

    def __init__(self, first: float, memory: float) -> None:
        self._unseen: Final = AcceptanceModel(first, memory)
        self._buckets: dict[int, AcceptanceModel] = {}

    def expected_accepts(self, batch: int, depth: int) -> Sequence[float]:
        bucket = bucket_of(batch)
        return (self._buckets.get(bucket) or self._nearest(bucket)).expected_accepts(depth)

    def uncertainty(self, batch: int, depth: int) -> float:
        bucket = bucket_of(batch)
        return (self._buckets.get(bucket) or self._copy_nearest(bucket)).uncertainty(depth)

    def observe(self, batch: int, reached: Sequence[int], accepted: Sequence[int]) -> None:
        bucket = bucket_of(batch)
        if bucket not in self._buckets:
            self._buckets[bucket] = self._copy_nearest(bucket)
        self._buckets[bucket].observe(reached, accepted)

    def discount(self, share: float, most: float = math.inf) -> None:
        for model in self._buckets.values():
            model.discount(share, most)

    def _nearest(self, bucket: int) -> AcceptanceModel:
        """Return the model of the next larger bucket with data, or else of the next smaller."""
        larger = [each for each in self._buckets if each > bucket]
        nearest = min(larger) if larger else max(self._buckets, default=None)
        return self._unseen if nearest is None else self._buckets[nearest]

    def _copy_nearest(self, bucket: int) -> AcceptanceModel:
        model = deepcopy(self._nearest(bucket))
        model.discount(1.0, most=_NEIGHBOUR_ROWS)
        return model
