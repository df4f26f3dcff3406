"""A model of two batches at once, which the product doesn't have: idle workers decode the next one.

They decode it with the weights they have, and engines change weights only between batches. So a
batch ahead is one update behind when it is learned from.
"""

from collections import deque
from itertools import islice

from tlt.simulation.answer_groups import Group
from tlt.simulation.job import Job, Trained
from tlt.simulation.world import Alarm, Drained, Finished, Happening, Worker, World


class _Batch:
    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self.queue = deque(answer for group in groups for answer in group.answers)
        self.answers = self.unfinished = len(self.queue)


class TwoBatchesScheduler:
    def __init__(self, job: Job, world: World) -> None:
        self.trained = Trained()
        self._job = job
        self._world = world
        self._groups = job.groups()
        # without learners of their own, workers decode and learn in turn
        self._learners = world.workers[: job.mode.learners] or world.workers
        self._updating = False
        # the batch at hand, then perhaps the next one
        self._batches = [self._open()]
        self._place_free_workers()

    def handle(self, happening: Happening) -> None:
        match happening:
            case Finished(worker):
                batch = next(each for each in self._batches if each.queue is worker.queue)
                batch.unfinished -= 1
                self._learn_if_complete()
            case Drained(worker):
                self._place(worker)
            case Alarm():
                self._publish()

    def _open(self) -> _Batch:
        return _Batch(list(islice(self._groups, self._job.spec.algorithm.prompts_per_step)))

    def _learn_if_complete(self) -> None:
        batch = self._batches[0]
        if self._updating or batch.unfinished:
            return
        self._updating = True
        tokens = self.trained.learn(batch.groups)
        for worker in self._learners:
            self._world.pause(worker)
            self._world.use(worker, "update")
        self._place_free_workers()
        self._world.alarm(self._job.inputs.update.seconds_of(tokens, len(self._learners)))

    def _publish(self) -> None:
        self._updating = False
        self.trained.steps += 1
        if self.trained.steps == self._job.steps:
            return
        self._batches = self._batches[1:] or [self._open()]
        for worker in self._world.workers:
            if worker.rows:
                if worker.use == "update":
                    self._world.resume(worker)
                self._world.use(worker, "batch")
        self._place_free_workers()
        self._learn_if_complete()

    def _place_free_workers(self) -> None:
        for worker in self._world.workers:
            if not worker.rows:
                self._place(worker)

    def _place(self, worker: Worker) -> None:
        """Let a worker without rows decode the batch at hand or the next one, or idle."""
        mode = self._job.mode
        if self._updating and worker.number < len(self._learners):
            return
        if worker.number < mode.learners or not self._decode(worker):
            self._world.use(worker, "drafter" if mode.speculates else "unused")

    def _decode(self, worker: Worker) -> bool:
        """Return False if no answer waits for a slot."""
        if len(self._batches) == 1 and not self._batches[0].queue:
            self._batches.append(self._open())
            for answer in self._batches[1].queue:
                answer.older = answer.length
        batch = next((each for each in self._batches if each.queue), None)
        if batch is None:
            return False
        share = -(-batch.answers // (self._job.workers - self._job.mode.learners))
        use = "batch" if batch is self._batches[0] else "ahead"
        self._world.assign(worker, batch.queue, share, use)
        return True
