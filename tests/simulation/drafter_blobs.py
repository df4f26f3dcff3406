"""Track the drafter blobs of the simulated world: in flight, committed or lost unnoticed."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.incarnation import blob
from tlt.base.id_types import Digest, DrafterVersion
from tlt.protocol.events import DrafterCommitFailed, DrafterDeltaReady, DrafterMerged, RunEvent
from tlt.protocol.refs import BlobRef, DrafterRef

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(eq=False)
class DrafterBlobs:
    world: "World"
    # blobs that a delivered event names
    announced: set[Digest] = field(default_factory=set)
    # blobs lost without an event
    lost_silently: set[Digest] = field(default_factory=set)
    # True if the run's folder accepts no more drafters
    disk_is_full: bool = False
    # by version: drafters that couldn't be committed, until the coordinator knows
    uncommitted: dict[DrafterVersion, Digest] = field(default_factory=dict)

    def losses(self) -> list[tuple[str, tuple[object, ...]]]:
        """Return the drafter blobs that could be lost next, and the disk's next fault."""
        there = self.announced & self.world.flight
        disk = "clear_disk" if self.disk_is_full else "fill_disk"
        return [(disk, ()), *(("lose_blob", (digest,)) for digest in sorted(there)[:4])]

    def fill_disk(self) -> None:
        self.disk_is_full = True

    def clear_disk(self) -> None:
        self.disk_is_full = False

    def lose_blob(self, digest: Digest) -> None:
        self.world.flight.discard(digest)
        self.lost_silently.add(digest)

    def put(self, name: str) -> BlobRef:
        made = blob(name)
        self.world.flight.add(made.digest)
        return made

    def is_readable(self, ref: BlobRef) -> bool:
        return ref.digest in self.world.flight | self.world.committed

    def is_missed(self, ref: BlobRef) -> bool:
        """Return True if the blob is gone and the coordinator doesn't know it."""
        return ref.digest in self.lost_silently or ref.digest in self.uncommitted.values()

    def announce(self, event: RunEvent) -> None:
        match event:
            case DrafterDeltaReady():
                self.announced.add(event.delta.blob.digest)
            case DrafterMerged():
                assert event.base.weights is not None
                self.announced |= {event.base.weights.digest, event.drafter.weights.digest}
            case DrafterCommitFailed():
                self.uncommitted.pop(event.version, None)
            case _:
                pass

    def commit(self, drafter: DrafterRef) -> None:
        there = self.is_readable(drafter.weights)
        assert there or drafter.weights.digest in self.lost_silently or self.world.blobs_were_lost
        if there and not self.disk_is_full:
            self.world.committed.add(drafter.weights.digest)
            return
        self.uncommitted[drafter.version] = drafter.weights.digest
        lost = DrafterCommitFailed(job=self.world.state.job, version=drafter.version, error="test")
        self.world.post("coordinator", lost)
