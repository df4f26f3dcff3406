"""Values that events, commands and Redis records share."""

from tlt.config import JobSpec
from tlt.ids import DrafterVersion, Incarnation, JobId, JobStatus, WorkerId
from tlt.protocol.refs import Value
from tlt.strategies import Strategy


class ControlRuns(Value, frozen=True, kw_only=True, array_like=True):
    """Of each run: tokens and seconds, squared and multiplied, summed over the runs."""

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
    worker: WorkerId
    incarnation: Incarnation
    ranks: int
    host: str
    # host:port where this worker's first rank serves a torch.distributed store
    rendezvous: str


class TokensByOrigin(Value, frozen=True, kw_only=True):
    """Tokens that were learned from, by where they came from."""

    # this rank's own finished answers, those of others, parts of answers that are still being
    # written, and answers of the step before
    own: int = 0
    others: int = 0
    running: int = 0
    previous: int = 0

    @property
    def total(self) -> int:
        return self.own + self.others + self.running + self.previous


class DrafterEvaluation(Value, frozen=True, kw_only=True):
    """Accept lengths on answers of the current policy; on held out ones, if there are such."""

    # of the drafter in use, if there is one, and of the one that was trained
    used: float | None
    trained: float
    answers: int


class Joules(Value, frozen=True, kw_only=True):
    """What was spent; None where nobody counts."""

    # by all processors of a host, whoever works there
    host: float | None = None
    # by a worker's own GPUs
    devices: float | None = None


class Heartbeat(Value, frozen=True, kw_only=True):
    """A worker's pulse: whoever watches it compares counters, never clocks."""

    incarnation: Incarnation
    counter: int
    # of the rank that has done the least since its last command; stands still when it is stuck
    progress: int
    running: int
    pid: int
    rank_pids: tuple[int, ...]
    job: JobId | None
    # that the worker and its ranks hold, by their own host's account
    resident_bytes: int = 0


class JobRecord(Value, frozen=True, kw_only=True):
    """What `tlt jobs` shows of a job."""

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
    # k3 estimate between the policy and the one that sampled
    sampling_kl: float
    reference_kl: float | None
    importance_truncated: float
    tokens: int
    samples: int
