"""Hold the data that all incarnations of a worker share, and the data of one incarnation."""

from dataclasses import dataclass, field

from tlt.actors.blobs_between_hosts import BlobTransfer
from tlt.actors.worker.rank_process import RANK_MODULE, RankProcess
from tlt.base.id_types import Incarnation, WorkerId
from tlt.protocol.rank_messages import RankSetup, ToRank
from tlt.spec.config import RolloutSpec, SessionSpec
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import Keys
from tlt.store.worker_fence import FencePlace


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """A worker's session, host and devices."""

    session: SessionSpec
    worker: WorkerId
    host: str
    # by rank
    devices: list[str]
    cores: list[frozenset[int]]
    blobs: BlobTransfer
    # what a rank's process runs
    rank_module: str = RANK_MODULE

    def rank(self, index: int, incarnation: Incarnation) -> RankSetup:
        """Return the setup of one rank."""
        return RankSetup(
            worker=self.worker,
            incarnation=incarnation,
            rank=index,
            device=self.devices[index],
            host=self.host,
            flight=self.session.flight,
            cores=tuple(tuple(sorted(cores)) for cores in self.cores),
        )


@dataclass(frozen=True, kw_only=True)
class IncarnationSetup:
    """One incarnation's name, ranks and connection to Redis."""

    connection: Connection
    keys: Keys
    worker: WorkerId
    incarnation: Incarnation
    ranks: list[RankProcess] = field(default_factory=list[RankProcess])

    @property
    def fence(self) -> FencePlace:
        """Return the place of this incarnation's fence."""
        return FencePlace(self.connection, self.keys, self.worker, self.incarnation)

    def engines(self, rollout: RolloutSpec) -> dict[int, RankProcess]:
        """Return the ranks that decode and train the drafter, by index."""
        return {index: self.ranks[index] for index in rollout.engine_ranks(len(self.ranks))}

    def send(self, message: ToRank) -> None:
        """Send a message to all ranks; those without an engine ignore what is not for them."""
        for rank in self.ranks:
            rank.send(message)
