"""What is known of one job's run, and every way in which it may change.

The tables name the transitions; a `Turn` refuses any other.
"""

from enum import StrEnum

import msgspec

from tlt.config import JobSpec
from tlt.ids import Epoch, Incarnation, JobId, PolicyVersion, Purpose, Step, WorkerId
from tlt.policies.drafter.training_state import DrafterTrainingState
from tlt.policies.job.rollout_batch import RolloutBatch
from tlt.policies.job.update_plan import Plan
from tlt.policies.speculation.savings_estimate import DecodeCost
from tlt.protocol.commands import RunCommand
from tlt.protocol.records import WorkerInfo
from tlt.protocol.refs import BlobRef, Checkpoint, PolicyRef


class Phase(StrEnum):
    STARTING = "starting"
    EVALUATING = "evaluating"
    ROLLOUT = "rolling"
    # seconds that are not idle, bought for the drafter because they are saved many times over
    RESERVED_TRAINING = "drafting"
    POLICY_UPDATE = "learning"
    ENDED = "ended"


class Duty(StrEnum):
    IDLE = "idle"
    ROLLOUT = "rollout"
    # trains the drafter
    DRAFTER_TRAINING = "draft"
    # was told to stop training it
    STOPPING = "preempting"
    POLICY_UPDATE = "learn"
    # told to start fresh ranks; takes no duty until it has joined again
    LEAVING = "leaving"


PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.STARTING: frozenset({Phase.EVALUATING, Phase.ROLLOUT, Phase.ENDED}),
    Phase.EVALUATING: frozenset({Phase.ROLLOUT, Phase.POLICY_UPDATE, Phase.ENDED}),
    Phase.ROLLOUT: frozenset({Phase.RESERVED_TRAINING, Phase.POLICY_UPDATE, Phase.ENDED}),
    Phase.RESERVED_TRAINING: frozenset({Phase.POLICY_UPDATE, Phase.ENDED}),
    # back to the round in hand, where an update only restored what a lost session had published
    Phase.POLICY_UPDATE: frozenset({Phase.EVALUATING, Phase.ROLLOUT, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}

DUTIES: dict[Duty, frozenset[Duty]] = {
    Duty.IDLE: frozenset({Duty.ROLLOUT, Duty.DRAFTER_TRAINING, Duty.POLICY_UPDATE, Duty.LEAVING}),
    # a round ends with the last score, which may overtake the last worker's WorkerIdled
    Duty.ROLLOUT: frozenset(
        {Duty.IDLE, Duty.ROLLOUT, Duty.DRAFTER_TRAINING, Duty.POLICY_UPDATE, Duty.LEAVING}
    ),
    # never straight to another duty: it says first that it has stopped
    Duty.DRAFTER_TRAINING: frozenset({Duty.IDLE, Duty.STOPPING, Duty.LEAVING}),
    Duty.STOPPING: frozenset({Duty.IDLE, Duty.LEAVING}),
    Duty.POLICY_UPDATE: frozenset({Duty.IDLE, Duty.LEAVING}),
    Duty.LEAVING: frozenset(),
}


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    info: WorkerInfo
    duty: Duty = Duty.IDLE
    # the version that this worker's trainer holds; fresh ranks hold the initial one
    trainer_version: PolicyVersion = PolicyVersion(0)
    # step, purpose and requeues of the round in which it last found the queue drained
    drained_batch: tuple[Step, Purpose, int] | None = None
    # the drafter's lesson that it takes part in, or last did
    training_session: int = 0
    # the last tallies that were heard of each of its ranks
    reported_serials: dict[int, int] = {}


class Best(msgspec.Struct, frozen=True, kw_only=True):
    version: PolicyVersion
    mean: float
    # None where they are not kept
    weights: BlobRef | None = None


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    job: JobId
    epoch: Epoch
    spec: JobSpec
    folder: str = ""
    train_prompts: int
    eval_prompts: int
    phase: Phase = Phase.STARTING
    step: Step = Step(0)
    # the version that rollouts use, and the one that the updates are to reach
    version: PolicyVersion = PolicyVersion(0)
    target: PolicyVersion = PolicyVersion(0)
    policy: PolicyRef = PolicyRef(version=PolicyVersion(0), weights=None)
    # the one before: a slow worker may still be reading it
    previous_policy: PolicyRef | None = None
    workers: dict[WorkerId, WorkerState] = {}
    # the newest incarnation that was heard of, alive or not: older ones never come back
    newest_incarnations: dict[WorkerId, Incarnation] = {}
    returning_workers: frozenset[WorkerId] = frozenset()
    losses: int = 0
    batch: RolloutBatch | None = None
    # what took the policy from a version to the next, kept until a checkpoint is past it
    plans: dict[PolicyVersion, Plan] = {}
    update_attempt: int = 0
    checkpoint: Checkpoint | None = None
    best: Best | None = None
    drafter_state: DrafterTrainingState = DrafterTrainingState()
    # when the round in hand was opened, and how long rounds of answers decode lately
    batch_opened_at: float = 0.0
    rollout_seconds: float = 0.0
    # what decoding took, by bucket of batch sizes, for as long as anybody speculates
    decode_costs: dict[int, DecodeCost] = {}
    speculation_allowed: bool = True


class Turn:
    """A decision in the making: the state so far and the commands that go with it."""

    def __init__(self, state: RunState, now: float) -> None:
        self.state = state
        self.now = now
        self.commands: list[RunCommand] = []

    def set(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)

    def enter(self, phase: Phase) -> None:
        if phase not in PHASES[self.state.phase]:
            raise AssertionError(f"no way from {self.state.phase} to {phase}")
        self.set(phase=phase)

    def assign(self, worker: WorkerId, duty: Duty, **changes: object) -> None:
        before = self.state.workers[worker]
        if duty not in DUTIES[before.duty]:
            raise AssertionError(f"{worker} cannot go from {before.duty} to {duty}")
        after = msgspec.structs.replace(before, duty=duty, **changes)
        self.set(workers={**self.state.workers, worker: after})

    def tell(self, command: RunCommand) -> None:
        self.commands.append(command)
