"""One incarnation of a simulated worker: what it was told, what it holds."""

from collections import deque
from dataclasses import dataclass, field

from tlt.ids import Digest, Incarnation, WorkerId
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
    """Which ranks find each other: a name may come again, but not in the same store."""
    return f"{learn.rendezvous}/{learn.group}"


@dataclass(eq=False)
class Pupil:
    """A rank, as far as it trains the drafter."""

    school: TrainDrafter | None = None
    # where it stands: a trunk, and what it learned that is not in it yet, part by part
    base: DrafterBase | None = None
    unmerged: set[int] = field(default_factory=set)
    # the same when it handed in a delta that is in no trunk yet, by number
    marks: dict[int, frozenset[int]] = field(default_factory=dict)
    # micro-batches since it last handed something in, and the number of the next delta
    opened: int = 0
    number: int = 0


@dataclass(eq=False)
class WorkerIncarnation:
    worker: WorkerId
    incarnation: Incarnation
    ranks: int
    # SIGSTOP: neither reads nor writes, and knows nothing of it
    stopped: bool = False
    commands: deque[WorkerCommand] = field(default_factory=deque)
    assignment: StartRollout | None = None
    # entries of the prompts stream that were pulled and not acknowledged
    held: dict[int, PromptIssued] = field(default_factory=dict)
    learning: UpdatePolicy | None = None
    # the collective is through, the report is not out
    trained: bool = False
    # whether its engine may guess, and how often its rank told how it decodes
    speculates: bool = True
    told: int = 0
    # what the trainer's weights are, as a name for their content
    content: str = INITIAL
    # the policy version that the engine decodes with
    version: int = 0
    # it has found out that it was shut out
    gone: bool = False
    # --- the drafter
    drafter: DrafterRef | None = None
    pupils: list[Pupil] = field(default_factory=list)
    training_session: TrainDrafter | None = None
    # the last lesson that it has said to be over
    over: int = 0
    dismissed: set[int] = field(default_factory=set)
    told_to_stop: bool = False
    # never stops training by itself
    deaf: bool = False
    merge: MergeDrafter | None = None
    # answers that it wrote or overheard: step, prompt, member
    overheard: set[tuple[int, int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pupils = [Pupil() for _ in range(self.ranks)]
