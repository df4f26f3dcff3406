"""The state of one job's run, and the transitions that it may make.

The tables name the transitions of phases and duties; a `Turn` refuses any other.
"""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from tlt.base.id_types import (
    Epoch,
    Incarnation,
    JobId,
    PolicyVersion,
    PromptIndex,
    Step,
    WorkerId,
)
from tlt.policies.algorithm.sample_sharding import UpdatePlan
from tlt.policies.drafter.drafter_state import DrafterState
from tlt.policies.run import rollout_batch
from tlt.policies.run.rollout_batch import AnswerEvent, CarriedGroup, QueueKey, RolloutBatch
from tlt.policies.speculation.savings_estimate import DecodeAccount
from tlt.protocol.commands import CutAnswers, RunCommand
from tlt.protocol.refs import BlobRef, Checkpoint, PolicyRef, PromptCursor
from tlt.protocol.shared_values import ChosenSizes, PromptSet, SizingFacts, WorkerInfo
from tlt.spec.config import JobSpec


class Phase(StrEnum):
    """A phase says what a job does now."""

    STARTING = "starting"
    EVALUATING = "evaluating"
    ROLLOUT = "rollout"
    POLICY_UPDATE = "policy_update"
    # without workers, except for those that are about to leave
    PAUSED = "paused"
    ENDED = "ended"


class Duty(StrEnum):
    """A duty says what a worker does now."""

    IDLE = "idle"
    ROLLOUT = "rollout"
    DRAFTER_TRAINING = "drafter_training"
    # was commanded to stop drafter training
    STOPPING = "stopping"
    POLICY_UPDATE = "policy_update"
    # was commanded to start fresh ranks, and takes no duty until it has joined again
    RESTARTING = "restarting"


_FROM_ANY = frozenset({Phase.PAUSED, Phase.ENDED})
PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.STARTING: frozenset({Phase.EVALUATING, Phase.ROLLOUT, Phase.ENDED}),
    Phase.EVALUATING: frozenset({Phase.ROLLOUT, Phase.POLICY_UPDATE}) | _FROM_ANY,
    Phase.ROLLOUT: frozenset({Phase.POLICY_UPDATE}) | _FROM_ANY,
    # returns to the open batch if the update only restored a policy that a lost session published,
    # or if there was nothing to update after a pause
    Phase.POLICY_UPDATE: frozenset({Phase.EVALUATING, Phase.ROLLOUT}) | _FROM_ANY,
    Phase.PAUSED: frozenset({Phase.POLICY_UPDATE, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}

_FREED = frozenset({Duty.IDLE, Duty.RESTARTING})
DUTIES: dict[Duty, frozenset[Duty]] = {
    Duty.IDLE: frozenset(Duty) - {Duty.IDLE, Duty.STOPPING},
    # the last score of a batch may overtake the last worker's WorkerIdled
    Duty.ROLLOUT: frozenset(Duty) - {Duty.STOPPING},
    # takes another duty only after the worker has reported that it stopped
    Duty.DRAFTER_TRAINING: _FREED | {Duty.STOPPING},
    Duty.STOPPING: _FREED,
    Duty.POLICY_UPDATE: _FREED,
    Duty.RESTARTING: frozenset(),
}


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    info: WorkerInfo
    duty: Duty = Duty.IDLE
    # the version that this worker's trainer holds; fresh ranks hold the initial one
    trainer_version: PolicyVersion = PolicyVersion(0)
    # how often the batch's queue had been refilled when it was last assigned to it
    refills: int = 0
    # True if it was last assigned to the next step's batch
    ahead: bool = False
    # step, purpose and refills of the queues that it last found drained, one a batch
    drained: tuple[QueueKey, ...] = ()
    # the training session that it takes part in, or took part in last
    training_session: int = 0
    # by rank: the serial of its last DecodingReported
    reported_serials: dict[int, int] = {}

    def with_drained(self, queue: QueueKey) -> tuple[QueueKey, ...]:
        """Return the queues that it has found drained, with this one as its batch's last."""
        others = [known for known in self.drained if known[:2] != queue[:2]]
        return (*others[-1:], queue)

    @property
    def decodes_ahead(self) -> bool:
        return self.ahead and self.duty is Duty.ROLLOUT

    @property
    def members(self) -> set[str]:
        """Return the names that its ranks have as members of drafter training."""
        return {f"{self.info.incarnation}.{rank}" for rank in range(self.info.ranks)}


class BestPolicy(msgspec.Struct, frozen=True, kw_only=True):
    version: PolicyVersion
    mean: float
    # the mean reward of each prompt's answers, by set; None where none has a reward
    prompt_means: dict[str, tuple[float | None, ...]] = {}
    # None where the best weights aren't kept
    weights: BlobRef | None = None
    adapter: BlobRef | None = None


class PolicyState(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's versions: the one that rollouts use, and the target of the updates."""

    # the version that the job began with: not 0 if it started from a checkpoint of another job
    initial_version: PolicyVersion = PolicyVersion(0)
    version: PolicyVersion = PolicyVersion(0)
    target_version: PolicyVersion = PolicyVersion(0)
    current: PolicyRef = PolicyRef(version=PolicyVersion(0), weights=None)
    # the version before `current`, which a slow worker may still read
    previous: PolicyRef | None = None
    # by the version that each starts from; kept until a later version is in a checkpoint
    plans: dict[PolicyVersion, UpdatePlan] = {}
    update_attempt: int = 0
    # updates in a row that made no optimiser step, because no gradient was finite
    skipped_updates: int = 0
    # the incarnations whose trainers split one copy of the policy, if the spec says so
    shard_holders: tuple[Incarnation, ...] = ()
    checkpoint: Checkpoint | None = None
    best: BestPolicy | None = None


class SpeculationAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """The batches since speculation was allowed, or since it was given up."""

    # False while speculation is given up, because it was found to cost more than it saves
    allowed: bool = True
    batches: int = 0
    # what they cost while it was allowed
    decoding: DecodeAccount = DecodeAccount()
    # attempts that have failed, and batches until the next one
    failed: int = 0
    pause: int = 0

    def count_batch(self) -> "SpeculationAttempt":
        return msgspec.structs.replace(self, batches=self.batches + 1)

    def give_up(self, factor: int) -> "SpeculationAttempt":
        """Pause for `factor` times its batches, and longer after each attempt that has failed."""
        failed = self.failed + 1
        pause = factor * failed * self.batches
        return SpeculationAttempt(allowed=False, failed=failed, pause=pause)

    def resume(self) -> "SpeculationAttempt":
        return SpeculationAttempt(failed=self.failed)


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    # the step of each loss of a worker
    loss_steps: tuple[Step, ...] = ()
    # engines of all workers by duty, so that an event doesn't look at each worker
    engines: dict[Duty, int] = {}
    # what ranks choose sizes by; None if the spec leaves none open
    sizing: SizingFacts | None = None
    # of all workers that have chosen sizes, lost ones included
    chosen_sizes: dict[WorkerId, ChosenSizes] = {}


class LaterSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of later steps than the one at hand."""

    # the next step's batch, which idle workers decode (`algorithm.staleness`)
    ahead: RolloutBatch | None = None
    # between two batches: the groups that the last one has left for the next one
    carried: dict[PromptIndex, CarriedGroup] = {}


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """One job's run; only `decide` makes its next state."""

    job: JobId
    epoch: Epoch
    spec: JobSpec
    folder: str = ""
    train_prompts: int
    # the sets of held-out prompts
    eval_sets: tuple[PromptSet, ...]
    phase: Phase = Phase.STARTING
    step: Step = Step(0)
    workers: dict[WorkerId, WorkerState] = {}
    # of all workers, lost ones included; messages of older incarnations change nothing
    newest_incarnations: dict[WorkerId, Incarnation] = {}
    # workers that are starting fresh ranks
    returning_workers: frozenset[WorkerId] = frozenset()
    membership: Membership = Membership()
    batch: RolloutBatch | None = None
    later: LaterSteps = LaterSteps()
    # None before the first rollout batch, or if its step implies it
    cursor: PromptCursor | None = None
    policy: PolicyState = PolicyState()
    drafter: DrafterState = DrafterState()
    # not updated while speculation is not allowed
    decoding: DecodeAccount = DecodeAccount()
    attempt: SpeculationAttempt = SpeculationAttempt()

    @property
    def ahead(self) -> RolloutBatch | None:
        return self.later.ahead

    @property
    def carried(self) -> dict[PromptIndex, CarriedGroup]:
        return self.later.carried

    @property
    def losses(self) -> int:
        return len(self.membership.loss_steps)

    @property
    def waiting_groups(self) -> int:
        """Count the groups that a step has ended without."""
        return len(self.carried) + (0 if self.cursor is None else len(self.cursor.deferred))

    @property
    def speculation_allowed(self) -> bool:
        return self.attempt.allowed


def current_worker(
    state: RunState, worker: WorkerId, incarnation: Incarnation
) -> WorkerState | None:
    """Return the worker if this incarnation of it is alive."""
    known = state.workers.get(worker)
    return known if known is not None and known.info.incarnation == incarnation else None


def is_ahead(state: RunState, batch: RolloutBatch) -> bool:
    """Return True for the next step's batch."""
    known = state.ahead
    return known is not None and (batch.step, batch.purpose) == (known.step, known.purpose)


def batch_with(state: RunState, event: AnswerEvent) -> RolloutBatch | None:
    """Return the open batch that an answer is of."""
    for batch in (state.batch, state.ahead):
        if batch is not None and rollout_batch.contains(batch, event):
            return batch
    return None


def count_engines(state: "RunState", workers: Iterable[WorkerState]) -> int:
    """Count the engines of some workers: with tensor parallelism, several ranks share one."""
    # as `engine_ranks` does, without a call for each of many workers
    width = state.spec.rollout.tensor_parallel
    return sum([-(-worker.info.ranks // width) for worker in workers])


def engines_on(state: "RunState", duties: Iterable[Duty]) -> int:
    """Count the engines of all workers that have one of some duties."""
    engines = state.membership.engines
    return sum([engines.get(duty, 0) for duty in duties])


def all_engines(state: "RunState") -> int:
    return sum(state.membership.engines.values())


class Turn:
    """A decision in progress: the state so far and the commands that go with it."""

    def __init__(self, state: RunState, now: float) -> None:
        self.state = state
        self.now = now
        self.commands: list[RunCommand] = []

    def set(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)

    def set_batch(self, batch: RolloutBatch) -> None:
        """Change the batch at hand or the next step's."""
        if is_ahead(self.state, batch):
            self.set_later(ahead=batch)
        else:
            self.set(batch=batch)

    def set_later(self, **changes: object) -> None:
        self.set(later=msgspec.structs.replace(self.state.later, **changes))

    def set_policy(self, **changes: object) -> None:
        self.set(policy=msgspec.structs.replace(self.state.policy, **changes))

    def set_drafter(self, **changes: object) -> None:
        """Keep the same object where nothing changes, because reports compare identities."""
        before = self.state.drafter
        if any(getattr(before, name) is not value for name, value in changes.items()):
            self.set(drafter=msgspec.structs.replace(before, **changes))

    def set_worker(self, worker: WorkerId, **changes: object) -> None:
        self.put_worker(worker, msgspec.structs.replace(self.state.workers[worker], **changes))

    def put_worker(self, worker: WorkerId, after: WorkerState | None) -> None:
        """Add or change a worker; None removes it."""
        state, before = self.state, self.state.workers.get(worker)
        workers = {**state.workers}
        if after is None:
            del workers[worker]
        else:
            workers[worker] = after
        if before is None or after is None or before.duty is not after.duty:
            engines = dict(state.membership.engines)
            for known, sign in ((before, -1), (after, 1)):
                if known is not None:
                    more = sign * count_engines(state, [known])
                    engines[known.duty] = engines.get(known.duty, 0) + more
            membership = msgspec.structs.replace(state.membership, engines=engines)
            self.set(workers=workers, membership=membership)
        else:
            self.set(workers=workers)

    def enter(self, phase: Phase) -> None:
        if phase not in PHASES[self.state.phase]:
            raise AssertionError(f"no transition from {self.state.phase} to {phase}")
        self.set(phase=phase)

    def assign(self, worker: WorkerId, duty: Duty, **changes: object) -> None:
        before = self.state.workers[worker].duty
        if duty not in DUTIES[before]:
            raise AssertionError(f"{worker} cannot go from {before} to {duty}")
        self.set_worker(worker, duty=duty, **changes)

    def cut(self, worker: WorkerState) -> None:
        """Command a worker to cut its answers to training prompts."""
        info = worker.info
        self.emit(CutAnswers(worker=info.worker, incarnation=info.incarnation, job=self.state.job))

    def emit(self, command: RunCommand) -> None:
        self.commands.append(command)
