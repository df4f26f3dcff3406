"""A simulated job, what it does against long answers, and what its updates learned from."""

from collections import deque
from collections.abc import Iterable, Iterator, KeysView, Sequence

import msgspec
from msgspec.structs import replace

from tlt.simulation.answer_groups import Group, draw_groups
from tlt.simulation.engine_speed import EngineSpeed
from tlt.simulation.inputs import Inputs
from tlt.simulation.world import World
from tlt.spec.config import JobSpec


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """Say what is done against long answers."""

    speculates: bool = False
    # as in a spec
    partial: float = 0.0
    defer_long: float = 0.0
    # True if idle workers decode the next batch (`algorithm.staleness: 1`)
    ahead: bool = False

    @property
    def parts(self) -> KeysView[str]:
        """Name what is added to synchronous steps without speculation."""
        added = {
            "speculation": self.speculates,
            "deferred groups": self.defer_long > 0,
            "resumed answers": self.partial > 0,
            "two batches": self.ahead,
        }
        return {part: True for part, is_used in added.items() if is_used}.keys()

    @property
    def name(self) -> str:
        return " + ".join(self.parts) or "synchronous"

    def spec_of(self, spec: JobSpec) -> JobSpec:
        rollout = replace(spec.rollout, partial=self.partial, defer_long=self.defer_long)
        algorithm = replace(spec.algorithm, staleness=int(self.ahead))
        return replace(spec, rollout=rollout, algorithm=algorithm)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    spec: JobSpec
    inputs: Inputs
    # a worker has one engine
    workers: int
    steps: int
    mode: Mode = Mode()
    seed: int = 0

    @property
    def slots(self) -> int:
        """Return a worker's slots: its even share of a rollout batch if the spec leaves it open."""
        slots = self.spec.rollout.slots
        return self.share(self.mode.spec_of(self.spec).issued_answers) if slots == "auto" else slots

    def share(self, answers: int) -> int:
        return max(1, -(-answers // self.workers))

    def world(self) -> World:
        drafts = self.inputs.drafts if self.mode.speculates else ()
        return World(self.workers, self.slots, EngineSpeed(self.inputs.engine, drafts))

    def groups(self, seed: int = 0) -> Iterator[Group]:
        return draw_groups(self.spec, self.inputs, self.seed + seed)


class Trained(msgspec.Struct):
    """Count what the updates learned from."""

    steps: int = 0
    # the numbers of the groups
    groups: list[int] = []
    tokens: int = 0
    # of these, tokens of older weights than the update's
    older_tokens: int = 0

    def learn(self, groups: Sequence[Group]) -> int:
        """Count groups; return their tokens."""
        answers = [answer for group in groups for answer in group.answers]
        tokens = sum(answer.length for answer in answers)
        self.groups += [group.number for group in groups]
        self.tokens += tokens
        self.older_tokens += sum(answer.older for answer in answers)
        return tokens


def rollout_seconds(job: Job, groups: Iterable[Sequence[int]]) -> float:
    """Return how long the workers take for one batch of these lengths."""
    world = job.world()
    queue = deque(each for n, lengths in enumerate(groups) for each in Group(n, lengths).answers)
    answers = len(queue)
    for worker in world.workers:
        world.assign(worker, queue, job.share(answers))
    while world.ended < answers:
        world.next()
    return world.now
