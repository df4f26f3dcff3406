"""A simulated job, and the interface between its workers and what schedules them."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from tlt.simulation.answer_groups import Group, GroupSource
from tlt.simulation.engine_speed import EngineSpeed
from tlt.simulation.inputs import Inputs
from tlt.simulation.world import Happening, World
from tlt.spec.config import JobSpec


class Job(msgspec.Struct, frozen=True, kw_only=True):
    spec: JobSpec
    inputs: Inputs
    # a worker has one engine
    workers: int
    steps: int
    speculates: bool
    seed: int = 0

    @property
    def slots(self) -> int:
        """Return a worker's slots: its even share of a rollout batch if the spec leaves it open."""
        slots = self.spec.rollout.slots
        return self.share(self.spec.algorithm.answers_per_step) if slots == "auto" else slots

    def share(self, answers: int) -> int:
        return max(1, -(-answers // self.workers))

    def world(self) -> World:
        drafts = self.inputs.drafts if self.speculates else ()
        return World(self.workers, self.slots, EngineSpeed(self.inputs.engine, drafts))

    def groups(self, seed: int = 0) -> GroupSource:
        return GroupSource(self.spec, self.inputs, self.seed + seed)


class Trained(msgspec.Struct):
    """Count what the updates learned from."""

    steps: int = 0
    # the numbers of the groups
    groups: list[int] = []
    tokens: int = 0
    # of these, tokens of older weights than the update's
    older_tokens: int = 0


class Scheduler(Protocol):
    trained: Trained
    # True after the last update
    done: bool

    def start(self) -> None: ...

    def handle(self, happening: Happening) -> None: ...


def run(world: World, scheduler: Scheduler) -> None:
    """Simulate until the last update."""
    scheduler.start()
    while not scheduler.done:
        scheduler.handle(world.next())
    for worker in world.workers:
        world.use(worker, "unused")


def rollout_seconds(job: Job, groups: Iterable[Sequence[int]]) -> float:
    """Return how long the workers take for one batch of these lengths."""
    world = job.world()
    answers = [each for n, lengths in enumerate(groups) for each in Group(n, lengths).answers]
    world.issue(0, answers)
    for worker in world.workers:
        world.assign(worker, 0, job.share(len(answers)))
    while world.ended < len(answers):
        world.next()
    return world.now
