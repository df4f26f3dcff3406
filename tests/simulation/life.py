"""One incarnation of a simulated worker: what it was told, what it holds."""

from collections import deque
from dataclasses import dataclass, field

from tlt.messages import BlobRef, Learn, PromptIssued, StartRollout, WorkerCommand
from tlt.types import Digest, Incarnation, WorkerId

INITIAL = "initial"


def blob(content: str) -> BlobRef:
    return BlobRef(digest=Digest(content), bytes=len(content))


def meeting(learn: Learn) -> str:
    """Which ranks find each other: a name may come again, but not in the same store."""
    return f"{learn.rendezvous}/{learn.group}"


@dataclass(eq=False)
class Life:
    worker: WorkerId
    incarnation: Incarnation
    ranks: int
    # SIGSTOP: neither reads nor writes, and knows nothing of it
    stopped: bool = False
    commands: deque[WorkerCommand] = field(default_factory=deque)
    assignment: StartRollout | None = None
    # entries of the prompts stream that were pulled and not acknowledged
    held: dict[int, PromptIssued] = field(default_factory=dict)
    learning: Learn | None = None
    # the collective is through, the report is not out
    trained: bool = False
    # whether its engine may guess, and how often its rank told how it decodes
    speculates: bool = True
    told: int = 0
    # what the trainer's weights are, as a name for their content
    content: str = INITIAL
    # the policy version that the engine decodes with
    version: int = 0
