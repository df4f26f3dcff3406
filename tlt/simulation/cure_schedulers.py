"""Models of cures for long answers: deferred groups, resumed answers, and two batches at once.

An intake says which groups a batch has, and what becomes of those that it ends without. With a
batch ahead, idle workers decode the next one with the weights they have; engines change weights
only between batches, so a batch ahead is one update behind when it is learned from.
"""

from typing import Literal

import msgspec

from tlt.simulation.answer_groups import Group
from tlt.simulation.scheduler import Job, Trained
from tlt.simulation.world import Alarm, Drained, Finished, Happening, Use, Worker, World

IntakeName = Literal["whole", "deferred", "resumed"]


class Cures(msgspec.Struct, frozen=True, kw_only=True):
    intake: IntakeName = "whole"
    # groups that a batch is issued beyond those that it needs, as a share of these
    surplus: float = 0.0
    # True if idle workers decode the next batch
    ahead: bool = False
    # workers that only learn; without any, all of them decode and learn
    learners: int = 0


class WholeBatches:
    """Wait for every answer of a batch."""

    label = ""
    # what the seconds of leftover answers were used for
    use: Use = "discarded"

    def __init__(self, job: Job, surplus: float = 0.0) -> None:
        self.waiting: list[Group] = []
        self._source = job.groups()
        self._needed = job.spec.algorithm.prompts_per_step
        self._issued = self._needed + round(surplus * self._needed)

    def take(self) -> list[Group]:
        return self._source.draw(self._issued)

    def put_back(self, groups: list[Group]) -> None:
        self.waiting += groups


class DeferredGroups(WholeBatches):
    """Decode the longest groups again, in a long batch of their own once there are enough."""

    label = "deferred groups"

    def take(self) -> list[Group]:
        if len(self.waiting) < self._needed:
            return super().take()
        taken, self.waiting = self.waiting[: self._needed], self.waiting[self._needed :]
        return taken

    def put_back(self, groups: list[Group]) -> None:
        super().put_back(groups)
        for group in groups:
            group.unfinished = len(group.answers)
            for answer in group.answers:
                answer.done = 0


class ResumedAnswers(WholeBatches):
    """Go on with unfinished answers in the next batch, from the tokens that they have."""

    label = "resumed answers"
    use: Use = "ahead"

    def take(self) -> list[Group]:
        taken, self.waiting = self.waiting, []
        return [*taken, *self._source.draw(max(0, self._issued - len(taken)))]

    def put_back(self, groups: list[Group]) -> None:
        super().put_back(groups)
        for group in groups:
            for answer in group.answers:
                answer.carried = answer.done


INTAKES: dict[IntakeName, type[WholeBatches]] = {
    "whole": WholeBatches,
    "deferred": DeferredGroups,
    "resumed": ResumedAnswers,
}


class _Batch:
    def __init__(self, number: int, version: int, groups: list[Group]) -> None:
        self.number = number
        self.version = version
        self.groups = groups
        self.answers = [each for group in groups for each in group.answers]
        self.complete = [group for group in groups if group.unfinished == 0]


class CureScheduler:
    def __init__(self, job: Job, world: World, cures: Cures) -> None:
        self.trained = Trained()
        self.done = False
        self.intake = INTAKES[cures.intake](job, cures.surplus)
        self._job = job
        self._world = world
        self._ahead_allowed = cures.ahead
        # without learners of their own, workers decode and learn in turn
        self._in_turn = cures.learners == 0
        self._learners = world.workers[: cures.learners] or world.workers
        self._decoders = world.workers[cures.learners :]
        self._opened = 0
        self._updating = False
        self._batch = self._open()
        self._ahead: _Batch | None = None

    def start(self) -> None:
        self._place_free_workers()

    def handle(self, happening: Happening) -> None:
        match happening:
            case Finished(worker, answer):
                answer.group.unfinished -= 1
                if answer.group.unfinished == 0:
                    self._complete(self._world.workers[worker], answer.group)
            case Drained(worker):
                self._place(self._world.workers[worker])
            case Alarm():
                self._publish()

    # --- batches

    def _open(self) -> _Batch:
        batch = _Batch(self._opened, self.trained.steps, self.intake.take())
        self._opened += 1
        self._world.issue(batch.number, [each for each in batch.answers if each.done < each.length])
        return batch

    def _complete(self, worker: Worker, group: Group) -> None:
        if worker.batch == self._batch.number:
            self._batch.complete.append(group)
            self._close_if_full()
        elif self._ahead is not None:
            self._ahead.complete.append(group)

    def _close_if_full(self) -> None:
        batch, needed = self._batch, self._job.spec.algorithm.prompts_per_step
        if self._updating or len(batch.complete) < needed:
            return
        self._updating = True
        self._world.cut(batch.number)
        learned = batch.complete[:needed]
        kept = {group.number for group in learned}
        left = [group for group in batch.groups if group.number not in kept]
        for group in left:
            for answer in group.answers:
                self._world.recharge(answer, self.intake.use)
        self.intake.put_back(left)
        self._learn(batch, learned)

    def _learn(self, batch: _Batch, groups: list[Group]) -> None:
        tokens, trained = sum(group.tokens for group in groups), self.trained
        carried = sum(answer.carried for group in groups for answer in group.answers)
        trained.older_tokens += tokens if batch.version < trained.steps else carried
        trained.groups += [group.number for group in groups]
        trained.tokens += tokens
        for worker in self._learners:
            if worker.rows:
                self._world.pause(worker)
        self._place_free_workers()
        costs = self._job.inputs.update
        self._world.alarm(costs.seconds_of(tokens, len(self._learners)))

    def _publish(self) -> None:
        self._updating = False
        self.trained.steps += 1
        self.done = self.trained.steps == self._job.steps
        if self.done:
            return
        self._batch, self._ahead = self._ahead or self._open(), None
        for answer in self._batch.answers:
            answer.seconds = 0.0
        self._world.promote(self._batch.number)
        for worker in self._world.workers:
            if worker.paused:
                self._world.resume(worker)
        self._place_free_workers()
        self._close_if_full()

    # --- workers

    def _place_free_workers(self) -> None:
        for worker in self._world.workers:
            if not worker.rows:
                self._place(worker)

    def _place(self, worker: Worker) -> None:
        """Let a worker without rows decode the batch at hand or the next one, learn, or idle."""
        learns = worker.number < len(self._learners)
        if self._updating and learns:
            self._world.use(worker, "update")
        elif not self._in_turn and learns:
            self._idle(worker)
        elif not self._updating and not self._world.is_drained(self._batch.number):
            self._assign(worker, self._batch, "batch")
        elif self._ahead_allowed:
            self._ahead = self._ahead or self._open()
            self._assign(worker, self._ahead, "ahead")
        else:
            self._idle(worker)

    def _assign(self, worker: Worker, batch: _Batch, use: Use) -> None:
        if self._world.is_drained(batch.number):
            self._idle(worker)
        else:
            share = -(-len(batch.answers) // len(self._decoders))
            self._world.assign(worker, batch.number, share, use)

    def _idle(self, worker: Worker) -> None:
        self._world.use(worker, "drafter" if self._job.speculates else "unused")
