"""Schedule simulated workers as the product does: by `decide`, with events that workers would send.

Rewards come at once, members of a group differ in them, and no drafter is ever merged.
"""

from collections import deque
from typing import Any

from msgspec.structs import replace

from tlt.base.id_types import (
    Attempt,
    Digest,
    Epoch,
    Incarnation,
    JobId,
    Member,
    PolicyVersion,
    PromptIndex,
    WorkerId,
)
from tlt.policies.run.coordinator import decide, new_run
from tlt.protocol.commands import (
    EndJob,
    IssuePrompts,
    RunCommand,
    StartJob,
    StartRollout,
    StopDrafterTraining,
    TrainDrafter,
    UpdatePolicy,
)
from tlt.protocol.events import (
    DrafterTrainingStopped,
    PolicyPublished,
    PolicyUpdateFinished,
    RolloutFinished,
    RolloutScored,
    RunEvent,
    WorkerIdled,
)
from tlt.protocol.refs import AnswerRef, BlobRef, PolicyRef
from tlt.protocol.shared_values import Prepared, WorkerInfo
from tlt.simulation.answer_groups import Answer
from tlt.simulation.scheduler import Job, Trained
from tlt.simulation.world import Alarm, Drained, Finished, Happening, Use, World
from tlt.spec.config import JobSpec
from tlt.spec.data_and_algorithm import DataSpec

_JOB = JobId("simulated")
_ANSWER = AnswerRef(file="answers", offset=0, bytes=0, digest=Digest("answer"))


class ProductScheduler:
    def __init__(self, job: Job, world: World) -> None:
        self.trained = Trained()
        self.done = False
        self._job = job
        self._world = world
        self._groups = job.groups()
        self._state = new_run(_JOB, _simulated_spec(job))
        self._events: deque[RunEvent] = deque()
        # of the batch at hand: what its events name, the prompt of each group, and the tokens
        self._batch: dict[str, Any] = {}
        self._prompts: dict[int, PromptIndex] = {}
        self._tokens = 0
        # what workers report with their idleness
        self._refills = 0
        # the update's commands that workers have got
        self._updates: list[UpdatePolicy] = []

    def start(self) -> None:
        spec = self._state.spec
        shape: dict[str, Any] = {"ranks": spec.rollout.tensor_parallel, "rendezvous": "host:1"}
        infos = [
            WorkerInfo(**_identity(number), **shape, host="host")
            for number in range(self._job.workers)
        ]
        prompts = spec.algorithm.prompts_per_step
        self._decide(
            StartJob(
                job=_JOB,
                epoch=Epoch(1),
                spec=spec,
                folder="/",
                prepared=Prepared(train_prompts=prompts, eval_prompts=0),
                workers=tuple(infos),
            )
        )

    def handle(self, happening: Happening) -> None:
        match happening:
            case Finished(worker, answer):
                self._decide(*self._answer_events(worker, answer))
            case Drained(worker):
                if not self._updates:
                    self._world.use(self._world.workers[worker], "unused")
                identity = _identity(worker)
                self._decide(WorkerIdled(**self._batch, **identity, requeues=self._refills))
            case Alarm():
                self._decide(*self._update_events())

    def _decide(self, *events: RunEvent) -> None:
        self._events += events
        while self._events:
            event = self._events.popleft()
            self._state, commands = decide(self._state, event, self._world.now)
            for command in commands:
                self._obey(command)

    def _obey(self, command: RunCommand) -> None:
        match command:
            case IssuePrompts():
                self._issue(command)
            case StartRollout():
                self._refills = command.requeues
                worker = self._world.workers[command.incarnation - 1]
                self._world.assign(worker, command.step, command.share)
            case TrainDrafter():
                self._use(command, "drafter")
            case StopDrafterTraining():
                self._events.append(_stopped(command))
            case UpdatePolicy():
                self._update(command)
            case EndJob():
                self.done = True
            case _:
                pass  # has no effect in the simulation

    def _issue(self, command: IssuePrompts) -> None:
        groups = self._groups.draw(len(command.prompts))
        numbers = [group.number for group in groups]
        self._prompts = dict(zip(numbers, command.prompts, strict=True))
        self._tokens = sum(group.tokens for group in groups)
        self._batch = {**_place(command, Attempt(0)), "purpose": command.purpose}
        self._world.issue(command.step, [each for group in groups for each in group.answers])

    def _answer_events(self, worker: int, answer: Answer) -> tuple[RolloutFinished, RolloutScored]:
        place: dict[str, Any] = {
            **self._batch,
            "prompt": self._prompts[answer.group.number],
            "member": Member(answer.member),
            "length": answer.length,
        }
        finished = RolloutFinished(
            **place,
            **_identity(worker),
            answer=_ANSWER,
            accepted=(),
            batch=1,
            decode_seconds=0.0,
            stop="stop",
        )
        return finished, RolloutScored(**place, reward=float(answer.member % 2))

    def _update(self, command: UpdatePolicy) -> None:
        self._use(command, "update")
        self._updates.append(command)
        if len(self._updates) == self._job.workers:
            costs = self._job.inputs.update
            self._world.alarm(costs.seconds_of(self._tokens, self._job.workers))

    def _update_events(self) -> list[RunEvent]:
        updates, self._updates = self._updates, []
        self.trained.steps += 1
        self.trained.groups += self._prompts
        self.trained.tokens += self._tokens
        version = PolicyVersion(updates[0].version + 1)
        place = _place(updates[0], updates[0].attempt)
        weights = BlobRef(digest=Digest(f"weights-{version}"), bytes=1)
        policy = PolicyRef(version=version, weights=weights)
        return [
            *(
                PolicyUpdateFinished(**place, **_identity(worker), version=version)
                for worker in range(len(updates))
            ),
            PolicyPublished(**place, policy=policy, metrics=None),
        ]

    def _use(self, command: TrainDrafter | UpdatePolicy, use: Use) -> None:
        self._world.use(self._world.workers[command.incarnation - 1], use)


def _simulated_spec(job: Job) -> JobSpec:
    """Return the job's spec, without what takes no part in the simulation."""
    spec = job.spec
    mode, train = ("adaptive", "auto") if job.speculates else ("off", "off")
    return replace(
        spec,
        data=DataSpec(train="prompts"),
        algorithm=replace(
            spec.algorithm, steps=job.steps, eval_every=0, dynamic_sampling=False, shards=1
        ),
        rollout=replace(spec.rollout, slots=job.slots),
        speculation=replace(spec.speculation, mode=mode, strategy=None),
        drafter=replace(spec.drafter, train=train),
    )


def _identity(worker: int) -> dict[str, Any]:
    return {"worker": WorkerId(f"w{worker}"), "incarnation": Incarnation(worker + 1)}


def _place(command: IssuePrompts | UpdatePolicy, attempt: Attempt) -> dict[str, Any]:
    return {"job": _JOB, "epoch": command.epoch, "step": command.step, "attempt": attempt}


def _stopped(command: StopDrafterTraining) -> DrafterTrainingStopped:
    return DrafterTrainingStopped(
        job=_JOB,
        worker=command.worker,
        incarnation=command.incarnation,
        training_session=command.training_session,
        dropped_seconds=0.0,
        median_seconds=0.0,
    )
