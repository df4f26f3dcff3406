"""Publish a member's work as deltas, often enough to be merged and seldom enough to be cheap.

An interrupted publication starts again before other work. After too many interrupts it is no longer
interrupted, because it might never end.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from tlt.base.id_types import PolicyVersion
from tlt.base.interrupt_check import CheckInterrupt, never_interrupt
from tlt.blobs.blob_files import Blobs
from tlt.errors import BlobError
from tlt.models.safetensors_io import map_weights
from tlt.models.weight_leaves import Layout, Piece
from tlt.protocol.events import DrafterDeltaReady
from tlt.protocol.refs import BlobRef, DrafterDelta
from tlt.protocol.shared_values import TokensByOrigin
from tlt.ranks.drafter.merged_delta_tracker import DeltaTracker
from tlt.ranks.rank_job_context import RankJob
from tlt.trainer.drafter.delta_merging import Delta

# a delta is due after this many micro-batches of this many seconds, or after few long ones
_UPDATES = 8
_SECONDS, _LONG_SECONDS = 0.5, 4.0
# share of the time that publishing may take
_SHARE = 0.05
# a stop waits for a publication of this share or this duration, at first estimated at this speed
_STOP_SECONDS, _BYTES_PER_SECOND = 0.05, 1e9
# number of interrupts after which a publication is no longer interrupted
_MOST_INTERRUPTS = 8


@dataclass
class UnpublishedWork:
    """Totals of the micro-batches since the last delta, and the cost of interrupts."""

    seconds: list[float] = field(default_factory=list[float])
    reading_seconds: float = 0.0
    loss: float = 0.0
    tokens: dict[str, int] = field(default_factory=dict[str, int])
    interrupts: int = 0
    interrupted_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A completed micro-batch: its duration, loss, and tokens by origin."""

    seconds: float
    loss: float
    tokens: list[tuple[str, int]]


class DeltaPublisher:
    """The work that a member has not published yet, and its publication."""

    def __init__(self, job: RankJob, blobs: Blobs, base_bytes: int) -> None:
        self._job = job
        self._blobs = blobs
        self._base_bytes = base_bytes
        self._work = UnpublishedWork()
        # duration of the last publication
        self._last_seconds = 0.0
        self._number = 0

    @property
    def updates(self) -> int:
        """Return the number of unpublished micro-batches."""
        return len(self._work.seconds)

    @property
    def is_due(self) -> bool:
        """Return True if there is enough unpublished work."""
        least = max(_SECONDS, self._last_seconds / _SHARE)
        enough = self.updates >= _UPDATES or self._taken >= _LONG_SECONDS
        return self.updates > 0 and enough and self._taken >= least

    @property
    def is_quick(self) -> bool:
        """Return True if a stop may wait for it; a large drafter is kept for the next session."""
        expected = self._last_seconds or self._base_bytes / _BYTES_PER_SECOND
        return expected <= max(_STOP_SECONDS, _SHARE * self._taken)

    @property
    def _taken(self) -> float:
        return sum(self._work.seconds) + self._work.reading_seconds

    def add(self, micro_batch: MicroBatch) -> None:
        """Count a micro-batch."""
        self._work.seconds.append(micro_batch.seconds)
        self._work.loss += micro_batch.loss
        for origin, tokens in micro_batch.tokens:
            self._work.tokens[origin] = self._work.tokens.get(origin, 0) + tokens

    def add_reading(self, seconds: float) -> None:
        """Count time that was spent in prefills."""
        self._work.reading_seconds += seconds

    def drop(self) -> float:
        """Drop unpublished work that is void; return the seconds of its micro-batches."""
        seconds = sum(self._work.seconds)
        self._work = UnpublishedWork()
        return seconds

    def start_over(self) -> None:
        """Forget unpublished work and how long publications take."""
        self._work = UnpublishedWork()
        self._last_seconds = 0.0

    def limit_interrupts(self, check: CheckInterrupt) -> CheckInterrupt:
        """Return the check, or one that never interrupts after too many interrupts."""
        return never_interrupt if self._work.interrupts >= _MOST_INTERRUPTS else check

    def count_interrupt(self, seconds: float) -> None:
        """Count an interrupt, and the seconds of work that it dropped."""
        self._work.interrupts += 1
        self._work.interrupted_seconds += seconds

    def publish(
        self,
        tracker: DeltaTracker,
        session: int,
        policy: PolicyVersion,
        median_seconds: float,
        check: CheckInterrupt,
    ) -> DrafterDeltaReady:
        """Write a delta of all unpublished work; an interrupt leaves everything as it was."""
        began, setup, work = time.monotonic(), self._job.setup, self._work
        assert tracker.base is not None
        try:
            check()
            delta, blob = put_delta(tracker, self._number, self._blobs, check)
        except BlobError:
            raise
        except Exception:
            self.count_interrupt(time.monotonic() - began)
            raise
        ref = DrafterDelta(
            worker=setup.worker,
            incarnation=setup.incarnation,
            rank=setup.rank,
            number=self._number,
            base=tracker.base.version,
            blob=blob,
            micro_batches=delta.micro_batches,
            previous_micro_batches=delta.previous_micro_batches,
        )
        self._number += 1
        self._last_seconds = time.monotonic() - began
        self._work = UnpublishedWork()
        return DrafterDeltaReady(
            job=self._job.id,
            training_session=session,
            policy=policy,
            delta=ref,
            updates=len(work.seconds),
            tokens=TokensByOrigin(**work.tokens),
            seconds=sum(work.seconds),
            reading_seconds=work.reading_seconds,
            publishing_seconds=work.interrupted_seconds + self._last_seconds,
            median_seconds=median_seconds,
            longest_seconds=max(work.seconds),
            loss=work.loss / len(work.seconds),
        )


def put_delta(
    tracker: DeltaTracker, number: int, blobs: Blobs, check: CheckInterrupt
) -> tuple[Delta, BlobRef]:
    """Write a delta while it is computed; the tracker maps it, whoever releases the file."""
    stored: list[BlobRef] = []

    def store(layout: Layout, pieces: Iterator[Piece]) -> dict[str, Tensor]:
        leaves = layout.leaves(pieces, tracker.learner.device)
        stored.append(blobs.put_leaves(leaves, commit=False, check=check))
        return map_weights(blobs.path(stored[0]))

    return tracker.take_delta(number, store, check), stored[0]
