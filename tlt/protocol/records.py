"""Values that events, commands and Redis records share."""

from tlt.config import JobSpec
from tlt.ids import DrafterVersion, Incarnation, JobId, JobStatus, WorkerId
from tlt.protocol.refs import Value
from tlt.strategies import Strategy


class ControlRuns(Value, frozen=True, kw_only=True, array_like=True):
    """Sums over control runs: each run's tokens and seconds, squared and multiplied."""

    count: int
    tokens_squared: float
    seconds_squared: float
    product: float


class StrategyTally(Value, frozen=True, kw_only=True):
    """Add up the decode steps with one strategy at batch sizes of one bucket."""

    strategy: Strategy
    # the largest batch size of the bucket
    bucket: int
    # the version that proposed, if a drafter did
    drafter: DrafterVersion | None
    # set for control runs only: those that have ended
    control: ControlRuns | None
    steps: int
    # steps taken to explore the strategy rather than because it was predicted best
    explored: int
    # running rows, summed over the steps
    rows: int
    tokens: int
    seconds: float
    # tokens predicted for these seconds
    expected: float


class WorkerInfo(Value, frozen=True, kw_only=True):
    """A worker that has joined the session."""

    worker: WorkerId
    incarnation: Incarnation
    ranks: int
    host: str
    # host:port where this worker's first rank serves a torch.distributed store
    rendezvous: str


class TokensByOrigin(Value, frozen=True, kw_only=True):
    """Tokens that were learned from: finished answers of the rank's own and of others, answers
    that are still being written, and answers of the step before.
    """

    own: int = 0
    others: int = 0
    running: int = 0
    previous: int = 0

    @property
    def total(self) -> int:
        """Return the tokens of all origins."""
        return self.own + self.others + self.running + self.previous


class DrafterEvaluation(Value, frozen=True, kw_only=True):
    """Accept lengths of two drafters on answers of the current policy, held out where possible."""

    # the drafter in use; None if there is none
    used: float | None
    # the drafter that was trained
    trained: float
    answers: int


class Joules(Value, frozen=True, kw_only=True):
    """Energy that was spent; None where the machine has no counter."""

    # all processors of the host, other programs included
    host: float | None = None
    # the worker's own GPUs
    devices: float | None = None


class Heartbeat(Value, frozen=True, kw_only=True):
    """A worker's sign of life: observers compare its counter, never clocks."""

    incarnation: Incarnation
    counter: int
    # work done by the rank that has done the least; stands still when that rank is stuck
    progress: int
    # requests being decoded
    running: int
    pid: int
    rank_pids: tuple[int, ...]
    job: JobId | None
    # memory of the worker and its ranks
    resident_bytes: int = 0


class JobRecord(Value, frozen=True, kw_only=True):
    """A job as `tlt jobs` shows it."""

    job: JobId
    status: JobStatus
    error: str | None
    submitted: float
    folder: str
    spec: JobSpec


class UpdateMetrics(Value, frozen=True, kw_only=True):
    """Means over the samples of one update."""

    loss: float
    gradient_norm: float
    learning_rate: float
    entropy: float
    clipped_low: float
    clipped_high: float
    # k3 estimate of the divergence between the policy and the one that sampled
    sampling_kl: float
    reference_kl: float | None
    importance_truncated: float
    tokens: int
    samples: int
