"""Values that events, commands and Redis records share."""

from typing import Annotated

import msgspec

from tlt.base.id_types import (
    Count,
    DrafterVersion,
    Finite,
    Incarnation,
    JobName,
    JobStatus,
    PathName,
    WorkerId,
)
from tlt.base.strategies import Strategy
from tlt.protocol.refs import StartingCheckpoint, Value
from tlt.spec.config import JobSpec
from tlt.spec.rollout import RolloutSpec


class ControlRuns(Value, frozen=True, kw_only=True, array_like=True):
    """Sums over control runs of the squares and the product of each run's steps and seconds.

    The seconds are those of work without the overhead.
    """

    count: Count
    steps_squared: Finite
    seconds_squared: Finite
    product: Finite


class StrategyTally(Value, frozen=True, kw_only=True):
    """Sums over the decode steps with one strategy at batch sizes of one bucket."""

    strategy: Strategy
    # the largest batch size of the bucket
    bucket: Count
    # the drafter version that proposed; None if the strategy uses no drafter
    drafter: DrafterVersion | None
    # the control runs that have ended; None for steps outside of control runs
    control: ControlRuns | None
    steps: Count
    # steps that explored the strategy although another one was predicted best
    explored: Count
    # running rows, summed over the steps
    rows: Count
    tokens: Count
    seconds: Finite
    # the same by a clock that stops while other programs run: CPU time, on CPUs
    work: Finite
    # of this work: what being able to speculate costs, whether or not a step speculates
    overhead: Finite
    # tokens predicted for these seconds
    expected: Finite


class WorkerInfo(Value, frozen=True, kw_only=True):
    """A worker that has joined the session."""

    worker: WorkerId
    incarnation: Incarnation
    ranks: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    host: str
    # host:port where this worker's first rank serves a torch.distributed store
    rendezvous: str


class ChosenSizes(Value, frozen=True, kw_only=True):
    """The sizes that a worker's ranks use where the spec leaves them open."""

    # answers that each engine decodes together
    slots: Count
    # most tokens of a forward and backward pass
    microbatch_tokens: Count
    # tokens that each engine of SGLang caches; journals of earlier versions don't have it
    cache_tokens: Count | None = None


class SizingFacts(Value, frozen=True, kw_only=True):
    """The facts of a job by which a rank chooses sizes."""

    # of the whole job
    ranks: Count = 1
    # answers of a rollout batch
    answers: Count
    # tokens of the longest prompt; 0 if unknown
    longest_prompt: Count = 0
    # what the worker has used so far
    chosen: ChosenSizes | None = None

    def most_cached(self, rollout: RolloutSpec) -> int | None:
        """Return the tokens that SGLang caches; None for all that its slots may need."""
        return rollout.most_cached if self.chosen is None else self.chosen.cache_tokens

    def most_slots(self, rollout: RolloutSpec) -> int:
        """Return the slots that an engine can use: its even share of a rollout batch."""
        if self.chosen is not None:
            return self.chosen.slots
        engines = max(1, self.ranks // rollout.tensor_parallel) if rollout.spread else 1
        return max(1, -(-self.answers // engines))


class TokensByOrigin(Value, frozen=True, kw_only=True):
    """Tokens that a drafter was trained on, by the answers that they belong to."""

    # whole answers of this step, by the training rank and by other ranks
    own: Count = 0
    others: Count = 0
    # answers that are still being written
    unfinished: Count = 0
    # answers of earlier steps
    earlier: Count = 0

    @property
    def total(self) -> int:
        """Return the tokens of all origins."""
        return self.own + self.others + self.unfinished + self.earlier


class DrafterEvaluation(Value, frozen=True, kw_only=True):
    """Accept lengths of two drafters on answers of the current policy, held out where possible."""

    # accept length of the drafter in use; None if no drafter is
    accept_length_before: Finite | None
    # accept length of the drafter that was trained
    accept_length: Finite
    answers: Count


class Heartbeat(Value, frozen=True, kw_only=True):
    """A worker's heartbeat; observers compare its counter, never clocks."""

    incarnation: Incarnation
    counter: Count
    # pieces of work done by the rank that has done the least; stays the same while it is stuck
    progress: Count
    # requests being decoded
    running: Count
    pid: Count
    rank_pids: tuple[Count, ...]
    job: JobName | None
    # memory of the worker and its ranks together
    resident_bytes: Count = 0
    # the start of the worker's process, in clock ticks since the machine started
    start_ticks: Count = 0
    # by the clock of the worker's host
    sent_at: Finite = 0.0
    # address of that host
    host: str = ""


class ServiceHeartbeat(Value, frozen=True, kw_only=True):
    """The heartbeat of the coordinator or the reward scorer."""

    pid: Count
    start_ticks: Count
    sent_at: Finite
    # why it can't write a file, which it tries again
    waiting: str | None = None


class PromptSet(Value, frozen=True, kw_only=True):
    """The held-out prompts of an evaluation set; the sets' prompts follow one another."""

    # empty in the journals of versions that knew a single set
    name: str
    prompts: Count
    # rows that were left out, because their prompts are too long
    skipped: Count = 0


class HubPolicy(Value, frozen=True, kw_only=True):
    """A policy of the Hugging Face Hub, and the commit of it that a job begins with."""

    id: str
    # as the spec names it
    revision: str | None
    commit: str
    # of the commit, in the cache
    folder: PathName

    @property
    def name(self) -> str:
        asked = f" ({self.revision})" if self.revision not in (None, self.commit) else ""
        return f"{self.id} at {self.commit[:12]}{asked}"

    def with_folder(self, spec: JobSpec) -> JobSpec:
        """Return a spec that names the folder instead of the id."""
        policy = msgspec.structs.replace(spec.policy, path=self.folder, revision=None)
        return msgspec.structs.replace(spec, policy=policy)

    def with_commit(self, spec: JobSpec) -> JobSpec:
        """Return a spec that names this commit, wherever it is read."""
        policy = msgspec.structs.replace(spec.policy, path=self.id, revision=self.commit)
        return msgspec.structs.replace(spec, policy=policy)


class Prepared(Value, frozen=True, kw_only=True):
    """The facts about a job's prompts and policy that its preparation finds out."""

    train_prompts: Count
    eval_prompts: Count
    # tokens of the longest of both; 0 in journals that don't have it
    longest_prompt: Count = 0
    # rows of both that were left out, because their prompts are too long
    skipped_prompts: Count = 0
    # the sets that the held-out prompts belong to, one after the other
    eval_sets: tuple[PromptSet, ...] = ()
    # of a mixture: the prompts of each source, in the order of the spec
    train_sources: tuple[Count, ...] = ()
    # of the policy, all and those that are trained; 0 if its files don't say
    policy_weights: Count = 0
    trained_weights: Count = 0
    # None if the spec names a folder
    hub_policy: HubPolicy | None = None
    # why a job that would speculate by default doesn't; earlier versions' journals don't have it
    no_speculation: str | msgspec.UnsetType = msgspec.UNSET

    def settle(self, spec: JobSpec) -> JobSpec:
        """Return the spec that the job runs by."""
        spec = spec if self.hub_policy is None else self.hub_policy.with_folder(spec)
        return spec.settle_speculation(self.no_speculation or None)


class PreparationExit(msgspec.Struct, frozen=True, kw_only=True):
    """The end of the process that prepared one job."""

    code: int
    # or why the job is refused; None if the process ended without a result
    result: Prepared | str | None
    last_line: str


class EvaluationAnswer(Value, frozen=True, kw_only=True, array_like=True):
    """A held-out answer; one that was dropped has neither reward nor length."""

    # None if it is left out
    reward: Finite | None
    length: Count
    # it was cut off by a limit
    truncated: bool
    # what it says in the end, as far as the reward's verifier looks for that
    final: str | None = None
    correct: bool = False


class SetAnswers(Value, frozen=True, kw_only=True):
    """The answers of an evaluation set, prompt by prompt."""

    name: str
    prompts: tuple[tuple[EvaluationAnswer, ...], ...]
    skipped: Count = 0


class Pause(Value, frozen=True, kw_only=True):
    """The reason for which a job is paused, and since when."""

    since: float
    # what is short and what to do about it, if the session paused it; None if a user did
    shortage: str | None = None


class JobRecord(Value, frozen=True, kw_only=True):
    """A job as `tlt jobs` shows it."""

    job: JobName
    status: JobStatus
    error: str | None
    submitted: Finite
    folder: PathName
    spec: JobSpec
    starts_from: StartingCheckpoint | None = None
    priority: int = 0
    # None unless its status is `paused`
    pause: Pause | None = None


# a run that diverged reports 1e300
Metric = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]


class UpdateMetrics(Value, frozen=True, kw_only=True):
    """Means over the samples of one update."""

    loss: Metric
    gradient_norm: Metric
    learning_rate: Metric
    entropy: Metric
    clipped_low: Metric
    clipped_high: Metric
    # k3 estimate of the divergence between the policy and the one that sampled the answers
    sampling_kl: Metric
    reference_kl: Metric | None
    importance_truncated: Metric
    tokens: Count
    samples: Count
    # runs of earlier versions have neither
    optimiser_steps: Count = 0
    # steps that were left out, because their gradient wasn't finite
    skipped_steps: Count = 0
