"""Schedule simulated workers as the product does: by `decide`, with events that workers would send.

Rewards come at once, members of a group differ in them, and no drafter is ever merged.
"""

from collections import deque
from typing import Any

from msgspec.structs import replace

from tlt.base.id_types import (
    Digest,
    Epoch,
    Incarnation,
    JobId,
    PolicyVersion,
    PromptIndex,
    Step,
    WorkerId,
)
from tlt.policies.run.coordinator import decide, new_run
from tlt.protocol.commands import (
    CutAnswers,
    EndJob,
    IssuePrompts,
    ResumeAnswers,
    RunCommand,
    StartJob,
    StartRollout,
    StopDrafterTraining,
    ToWorker,
    TrainDrafter,
    UpdatePolicy,
)
from tlt.protocol.events import (
    DrafterTrainingStopped,
    PolicyPublished,
    PolicyUpdateFinished,
    RolloutCut,
    RolloutFinished,
    RolloutScored,
    RunEvent,
    WorkerIdled,
)
from tlt.protocol.refs import AnswerRef, BlobRef, PolicyRef
from tlt.protocol.shared_values import Prepared, WorkerInfo
from tlt.simulation.answer_groups import Answer, Group
from tlt.simulation.job import Job, Trained
from tlt.simulation.world import Alarm, Drained, Finished, Happening, Worker, World
from tlt.spec.config import JobSpec
from tlt.spec.data_and_algorithm import DataSpec

_JOB, _EPOCH = JobId("simulated"), Epoch(1)
_ANSWER = AnswerRef(file="answers", offset=0, bytes=0, digest=Digest("answer"))


class ProductScheduler:
    def __init__(self, job: Job, world: World) -> None:
        self.trained = Trained()
        # groups that were issued and that no update has learned from
        self.groups: dict[PromptIndex, Group] = {}
        self._job = job
        self._world = world
        self._source = job.groups()
        # by the parity of the step where two steps are decoded at once
        self._queues: tuple[deque[Answer], deque[Answer]] = (deque(), deque())
        self._events: deque[RunEvent] = deque()
        # the update's commands that workers have got, and its tokens
        self._updates: list[UpdatePolicy] = []
        self._tokens = 0
        self._state = new_run(_JOB, simulated_spec(job))
        self._decide(self._start())

    def handle(self, happening: Happening) -> None:
        match happening:
            case Finished(worker, answer):
                self._decide(*_answer_events(worker, answer))
            case Drained(worker):
                if not self._updates:
                    self._world.use(worker, "unused")
                self._decide(self._idled(worker))
            case Alarm():
                self._finish_update()

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
            case ResumeAnswers():
                for each in command.answers:
                    answer = self.groups[each.prompt].answers[each.member]
                    answer.attempt = each.attempt
                    self._queue(each.step).append(answer)
            case StartRollout():
                use = "batch" if command.step == self._state.step else "ahead"
                queue = self._queue(command.step)
                self._world.assign(self._worker(command), queue, command.share, use)
            case CutAnswers():
                worker = self._worker(command)
                self._events += [_cut(worker, answer) for answer in self._world.cut(worker)]
            case TrainDrafter():
                self._world.use(self._worker(command), "drafter")
            case StopDrafterTraining():
                self._events.append(_stopped(command))
            case UpdatePolicy():
                self._update(command)
            case EndJob():
                raise AssertionError(f"the simulated job ended: {command.error}")
            case _:
                pass  # has no effect in the simulation

    def _queue(self, step: Step) -> deque[Answer]:
        return self._queues[step % 2 if self._job.mode.ahead else 0]

    def _worker(self, command: ToWorker) -> Worker:
        return self._world.workers[command.incarnation - 1]

    def _issue(self, command: IssuePrompts) -> None:
        """Queue new groups, and those that were put off, with the lengths they had."""
        if self._job.mode.defer_long:
            # workers drop prompts of earlier steps
            self._queue(command.step).clear()
        for prompt in command.prompts:
            if prompt not in self.groups:
                self.groups[prompt] = next(self._source)
            group = self.groups[prompt]
            group.prompt, group.step = prompt, command.step
            if self._job.mode.ahead and command.step > 0:
                for answer in group.answers:
                    answer.older = answer.length
            self._queue(command.step).extend(group.answers)

    def _idled(self, worker: Worker) -> WorkerIdled:
        identity = _identity(worker.number)
        known = self._state.workers[identity["worker"]]
        place = {**_place(self._state.step + known.ahead), **identity}
        return WorkerIdled(**place, purpose="train", requeues=known.refills)

    # --- updates

    def _update(self, command: UpdatePolicy) -> None:
        if not self._updates:
            self._close_batch()
        self._world.use(self._worker(command), "update")
        self._updates.append(command)
        if len(self._updates) == self._job.workers:
            costs = self._job.inputs.update
            self._world.alarm(costs.seconds_of(self._tokens, self._job.workers))

    def _close_batch(self) -> None:
        """Learn from complete groups; the others go on or are decoded again."""
        cursor = self._state.cursor
        assert cursor is not None, "a step was open"
        ahead = self._state.ahead
        left = {*self._state.carried, *cursor.deferred, *(() if ahead is None else ahead.groups)}
        learned = [group for prompt, group in self.groups.items() if prompt not in left]
        self._tokens = self.trained.learn(learned)
        self.groups = {prompt: group for prompt, group in self.groups.items() if prompt in left}
        if ahead is not None:
            return
        again = self._job.mode.defer_long > 0
        for group in self.groups.values():
            for answer in group.answers:
                self._world.recharge(answer, "discarded" if again else "ahead")
                answer.done = answer.older = 0 if again else answer.done

    def _finish_update(self) -> None:
        self.trained.steps += 1
        if self.trained.steps == self._job.steps:
            return
        command, self._updates = self._updates[0], []
        version = PolicyVersion(command.version + 1)
        place = _place(command.step, command.attempt)
        weights = BlobRef(digest=Digest(f"weights-{version}"), bytes=1)
        policy = PolicyRef(version=version, weights=weights)
        for worker in self._world.workers:
            identity = _identity(worker.number)
            self._events.append(PolicyUpdateFinished(**place, **identity, version=version))
        self._decide(PolicyPublished(**place, policy=policy, metrics=None))

    def _start(self) -> StartJob:
        spec = self._state.spec
        host: dict[str, Any] = {"host": "host", "rendezvous": "host:1"}
        host["ranks"] = spec.rollout.tensor_parallel
        infos = [WorkerInfo(**_identity(each.number), **host) for each in self._world.workers]
        # enough that no prompt comes twice, with the surplus and what may wait
        prompts = (spec.algorithm.steps + 3) * spec.algorithm.prompts_per_step
        prepared = Prepared(train_prompts=prompts, eval_prompts=0)
        place: dict[str, Any] = {"job": _JOB, "epoch": _EPOCH, "folder": "/", "spec": spec}
        return StartJob(**place, prepared=prepared, workers=tuple(infos))


def simulated_spec(job: Job) -> JobSpec:
    """Return the job's spec, without what takes no part in the simulation."""
    spec = job.mode.spec_of(job.spec)
    mode, train = ("adaptive", "auto") if job.mode.speculates else ("off", "off")
    # the last steps issue no surplus
    steps = {"steps": job.steps + 2, "eval_every": 0, "dynamic_sampling": False, "shards": 1}
    return replace(
        spec,
        data=DataSpec(train="prompts"),
        algorithm=replace(spec.algorithm, **steps),
        rollout=replace(spec.rollout, slots=job.slots),
        speculation=replace(spec.speculation, mode=mode, strategy=None),
        drafter=replace(spec.drafter, train=train),
    )


def _identity(worker: int) -> dict[str, Any]:
    return {"worker": WorkerId(f"w{worker}"), "incarnation": Incarnation(worker + 1)}


def _place(step: int, attempt: int = 0) -> dict[str, Any]:
    return {"job": _JOB, "epoch": _EPOCH, "step": step, "attempt": attempt}


def _answer_place(answer: Answer) -> dict[str, Any]:
    group = answer.group
    place = {"purpose": "train", "prompt": group.prompt, "member": answer.member}
    return {**_place(group.step, answer.attempt), **place}


def _answer_events(worker: Worker, answer: Answer) -> tuple[RolloutFinished, RolloutScored]:
    place: dict[str, Any] = {**_answer_place(answer), "length": answer.length}
    how: dict[str, Any] = {"accepted": (), "batch": 1, "decode_seconds": 0.0, "stop": "stop"}
    finished = RolloutFinished(**place, **_identity(worker.number), answer=_ANSWER, **how)
    return finished, RolloutScored(**place, reward=float(answer.member % 2))


def _cut(worker: Worker, answer: Answer) -> RolloutCut:
    place = {**_answer_place(answer), **_identity(worker.number)}
    return RolloutCut(**place, answer=_ANSWER, decode_seconds=0.0, excused=answer.attempt)


def _stopped(command: StopDrafterTraining) -> DrafterTrainingStopped:
    place = {**_identity(command.incarnation - 1), "job": _JOB}
    seconds: dict[str, Any] = {"dropped_seconds": 0.0, "median_seconds": 0.0}
    session = command.training_session
    return DrafterTrainingStopped(**place, **seconds, training_session=session)
