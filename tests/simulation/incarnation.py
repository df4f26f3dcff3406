"""Hold the state of one incarnation of a simulated worker."""

from collections import deque
from dataclasses import dataclass, field

from tlt.base.id_types import Digest, Incarnation, WorkerId
from tlt.protocol.commands import (
    MergeDrafter,
    PromptIssued,
    StartRollout,
    TrainDrafter,
    UpdatePolicy,
    WorkerCommand,
)
from tlt.protocol.refs import BlobRef, DrafterBase, DrafterRef

INITIAL = "initial"


def blob(content: str) -> BlobRef:
    return BlobRef(digest=Digest(content), bytes=len(content))


def meeting(learn: UpdatePolicy) -> str:
    """Name a collective: group names may repeat, but not in the same rendezvous store."""
    return f"{learn.rendezvous}/{learn.group}"


@dataclass(eq=False)
class TrainingRank:
    """The drafter training state of a rank."""

    session: TrainDrafter | None = None
    # the base that it trains from, and its work that isn't in the base yet
    base: DrafterBase | None = None
    unmerged: set[int] = field(default_factory=set)
    # by unmerged delta: the unmerged work when it was sent
    sent: dict[int, frozenset[int]] = field(default_factory=dict)
    # micro-batches since the last delta, and the number of the next one
    opened: int = 0
    number: int = 0


@dataclass(eq=False)
class WorkerIncarnation:
    worker: WorkerId
    number: Incarnation
    ranks: int
    # SIGSTOP: the process neither reads nor writes
    stopped: bool = False
    commands: deque[WorkerCommand] = field(default_factory=deque)
    assignment: StartRollout | None = None
    # the last one, whose batch reports of decoding are about
    last_assignment: StartRollout | None = None
    # entries of the prompts stream that were pulled and not acknowledged
    held: dict[int, PromptIssued] = field(default_factory=dict)
    learning: UpdatePolicy | None = None
    # True between the collective and its report
    trained: bool = False
    # as the last StartRollout said
    speculates: bool = True
    reports: int = 0
    # the content of the trainer's weights
    content: str = INITIAL
    # the collective that split the weights, where ranks split one copy
    shards_of: str | None = None
    # the policy version that the engine decodes with
    version: int = 0
    # True once it knows that it is fenced off
    gone: bool = False
    # --- the drafter
    drafter: DrafterRef | None = None
    training_ranks: list[TrainingRank] = field(default_factory=list)
    training_session: TrainDrafter | None = None
    # the last session whose end was reported
    last_session: int = 0
    stopped_ranks: set[int] = field(default_factory=set)
    stopping: bool = False
    # True if only ReplaceRanks ends its training
    hangs: bool = False
    merge: MergeDrafter | None = None
    # answers of all workers: step, prompt, member
    known_answers: set[tuple[int, int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.training_ranks = [TrainingRank() for _ in range(self.ranks)]
