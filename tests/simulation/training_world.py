"""Simulate two workers, of which the first trains the drafter while the second decodes."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from tests.simulation.incarnation import WorkerIncarnation
from tests.simulation.moves import Move
from tests.simulation.specs import small_spec
from tests.simulation.world import World
from tlt.base.id_types import NAMED, WorkerId
from tlt.policies.run import coordinator
from tlt.protocol.commands import RunCommand
from tlt.protocol.events import DrafterDiverged, DrafterRefused, DrafterTrainingStopped
from tlt.protocol.refs import DrafterRef

DECODING = WorkerId("w1")
WORK = ("obey", "deliver", "pull", "finish", "idle", "score", "start")
# also ends a rollout batch and opens the next
WHOLE_STEP = (*WORK, "stop_rank", "update", "finish_update")
TRAINING_MOVES = ("train", "send_delta", "merge", "stop_rank")


class TrainingWorld(World):
    """A world that is driven by the names of its moves, and records all commands."""

    def __init__(
        self,
        ranks: tuple[int, ...] = (1, 1),
        train: Literal["auto", "always"] = "always",
        **spec: Any,
    ) -> None:
        self.commands: list[RunCommand] = []
        self.emitted = Counter[str]()
        spec = {"steps": 3, "merge_every": 1, **spec}
        super().__init__(small_spec(train=train, **spec), ranks, self._decide)

    def _decide(self, state: Any, event: Any, now: float) -> Any:
        after, commands = coordinator.decide(state, event, now)
        if now >= 0.0:
            self.commands += commands
            self.emitted.update(type(command).__name__ for command in commands)
        return after, commands

    @property
    def trainee(self) -> WorkerIncarnation:
        return self.incarnations[WorkerId("w0")]

    def run_until(
        self, until: Callable[[], bool], *kinds: str, but: WorkerId | None = None
    ) -> None:
        """Repeat moves of these kinds until a condition holds; `but` finishes no answer."""
        for _ in range(1000):
            if until():
                return
            for move in self.moves():
                incarnations = [arg for arg in move.args if isinstance(arg, WorkerIncarnation)]
                waits = move.kind == "finish" and any(
                    incarnation.worker == but for incarnation in incarnations
                )
                if move.kind in kinds and not waits and move in self.moves():
                    self.do(move)
                    if until():
                        return
        raise AssertionError(self.summary())

    def settle(self) -> None:
        """Deliver all events and execute all commands."""
        while found := [m for m in self.moves() if m.kind in ("deliver", "obey")]:
            self.do(found[0])

    def start_training(self) -> "TrainingWorld":
        second = self.incarnations[DECODING]
        self.run_until(lambda: second.assignment is not None, "obey", "deliver")
        self.do(Move("pull", (second,)))
        self.run_until(lambda: self.trainee.training_session is not None, *WORK, but=DECODING)
        return self

    def train_delta(self, rank: int = 0, incarnation: WorkerIncarnation | None = None) -> None:
        """Train on a rank, and publish its delta."""
        incarnation = incarnation or self.trainee
        self.do(Move("train", (incarnation, rank)))
        self.do(Move("send_delta", (incarnation, rank)))

    def merge(self, quality: float) -> None:
        self.drafter_training.quality = quality
        self.run_until(
            lambda: self.trainee.merge is not None, "deliver", "obey", "train", "send_delta"
        )
        self.do(Move("merge", (self.trainee,)))

    def adopt(self, quality: float) -> DrafterRef:
        """Train, merge and adopt one delta."""
        self.train_delta()
        self.merge(quality)
        self.settle()
        used = self.state.drafter.adoption.used
        assert used is not None
        return used

    def refuse(self, incarnation: WorkerIncarnation, drafter: DrafterRef | None) -> None:
        """Report that an incarnation can't load the drafter."""
        version = NAMED if drafter is None else drafter.version
        refused = DrafterRefused(
            job=self.state.job,
            worker=incarnation.worker,
            incarnation=incarnation.number,
            error="torn",
            version=version,
        )
        self.workers.report(incarnation, refused)
        self.settle()


def training_stopped(world: TrainingWorld) -> DrafterTrainingStopped:
    known = world.state.workers[WorkerId("w0")]
    return DrafterTrainingStopped(
        job=world.state.job,
        worker=known.info.worker,
        incarnation=known.info.incarnation,
        training_session=known.training_session,
        seconds=0.0,
        dropped_seconds=0.0,
        median_seconds=0.1,
    )


def diverged(world: TrainingWorld, base: int) -> DrafterDiverged:
    known = world.state.workers[WorkerId("w0")]
    return DrafterDiverged(
        job=world.state.job,
        worker=known.info.worker,
        incarnation=known.info.incarnation,
        training_session=known.training_session,
        base=base,  # pyright: ignore[reportArgumentType]
        error="test",
    )
