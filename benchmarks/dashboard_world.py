"""A simulated job of a thousand workers that writes its events at a steady rate.

`decide` consumes all events as in a coordinator, so that readers can fold the journal.
"""

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from tlt.base.id_types import (
    Attempt,
    Epoch,
    Incarnation,
    JobId,
    Member,
    PolicyVersion,
    PromptIndex,
    Step,
    WorkerId,
)
from tlt.base.strategies import Draft
from tlt.blobs.answer_files import Answer, AnswerFiles, pack_logprobs, pack_tokens
from tlt.policies.run import coordinator
from tlt.policies.run.run_state import RunState
from tlt.protocol.commands import Command, IssuePrompts, StartJob, UpdatePolicy
from tlt.protocol.events import (
    AnyEvent,
    DecodingReported,
    PolicyPublished,
    PolicyUpdateFinished,
    RolloutFinished,
    RolloutScored,
    RunEvent,
    WorkerIdled,
)
from tlt.protocol.refs import BatchSpan, PolicyRef
from tlt.protocol.shared_values import Prepared, StrategyTally, UpdateMetrics, WorkerInfo
from tlt.spec.config import (
    AlgorithmSpec,
    DataSpec,
    DrafterSpec,
    JobSpec,
    PolicySpec,
    RewardSpec,
    RolloutSpec,
    SpeculationSpec,
)
from tlt.store.journal import Journal, Position

_METRICS = UpdateMetrics(
    loss=0.1,
    gradient_norm=0.1,
    learning_rate=1e-6,
    entropy=0.3,
    clipped_low=0.001,
    clipped_high=0.001,
    sampling_kl=1e-4,
    reference_kl=None,
    importance_truncated=0.0,
    optimiser_steps=1,
    skipped_steps=0,
    tokens=1_000_000,
    samples=2048,
)


def big_spec(prompts: int = 256, group: int = 8) -> JobSpec:
    return JobSpec(
        name="big",
        policy=PolicySpec(path="policy"),
        data=DataSpec(train="train.jsonl"),
        reward=RewardSpec(kind="final_answer"),
        algorithm=AlgorithmSpec(steps=10_000, prompts_per_step=prompts, group_size=group),
        rollout=RolloutSpec(max_new_tokens=4096),
        speculation=SpeculationSpec(mode="adaptive"),
        drafter=DrafterSpec(train="off"),
    )


def _answer(length: int) -> Answer:
    return Answer(
        prompt=(1, 2, 3),
        token_bytes=pack_tokens([0] * length),
        logprob_bytes=pack_logprobs([0.0] * length),
        text="x" * length,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        policies=(),
        drafters=(),
        origin_bytes=bytes(length),
        batches=(BatchSpan(size=16, tokens=length),),
    )


class World:
    def __init__(self, job: JobId, folder: Path, workers: int, spec: JobSpec) -> None:
        self.spec = spec
        self.journal = Journal(folder, Position())
        self._answers = AnswerFiles(folder).writer("1.0")
        self._job = job
        self._folder = folder
        self._random = random.Random(0)
        self._infos = tuple(
            WorkerInfo(
                worker=WorkerId(f"w{number}"),
                incarnation=Incarnation(number + 1),
                ranks=1,
                host="host",
                rendezvous="127.0.0.1:1",
            )
            for number in range(workers)
        )
        self.state: RunState = coordinator.new_run(job, self.spec)
        self._serials = dict.fromkeys((info.worker for info in self._infos), 0)
        self._events = self._run_events()
        self._commands: deque[Command] = deque()

    def write(self, count: int) -> None:
        """Write `count` events in one batch."""
        written: list[tuple[float, AnyEvent, Sequence[Command]]] = []
        for _ in range(count):
            event = next(self._events)
            now = time.time()
            self.state, commands = coordinator.decide(self.state, event, now)
            self._commands.extend(commands)
            written.append((now, cast("AnyEvent", event), commands))
        self.journal.append(written)

    def _run_events(self) -> Iterator[RunEvent]:
        yield StartJob(
            job=self._job,
            epoch=Epoch(1),
            spec=self.spec,
            folder=str(self._folder),
            prepared=Prepared(train_prompts=100_000, eval_prompts=0),
            workers=self._infos,
        )
        while True:
            issued = next(c for c in self._commands if isinstance(c, IssuePrompts))
            self._commands.clear()
            yield from self._roll_out(issued)
            yield from self._update_policy()

    def _roll_out(self, issued: IssuePrompts) -> Iterator[RunEvent]:
        group = self.spec.algorithm.group_size
        answers = [(prompt, member) for prompt in issued.prompts for member in range(group)]
        self._random.shuffle(answers)
        idle = list(self._infos)
        self._random.shuffle(idle)
        for number, (prompt, member) in enumerate(answers):
            info = self._random.choice(self._infos)
            yield self._decoding_reported(info, issued.step)
            yield self._finished(info, issued.step, prompt, member)
            # workers run out of prompts one after the other before the last answers finish
            if number > len(answers) // 2 and idle and number % 2:
                yield self._idled(idle.pop(), issued.step)
            yield self._scored(issued.step, prompt, member)

    def _update_policy(self) -> Iterator[RunEvent]:
        updates = [command for command in self._commands if isinstance(command, UpdatePolicy)]
        version = PolicyVersion(updates[0].version + 1)
        step, attempt = updates[0].step, updates[0].attempt
        yield PolicyPublished(
            job=self._job,
            epoch=Epoch(1),
            step=step,
            attempt=attempt,
            policy=PolicyRef(version=version, weights=None),
            metrics=_METRICS,
        )
        for info in self._infos:
            yield PolicyUpdateFinished(
                job=self._job,
                epoch=Epoch(1),
                step=step,
                attempt=attempt,
                worker=info.worker,
                incarnation=info.incarnation,
                version=version,
            )

    def _decoding_reported(self, info: WorkerInfo, step: Step) -> DecodingReported:
        self._serials[info.worker] += 1
        depth = self._random.choice((4, 6, 8))
        tally = StrategyTally(
            strategy=Draft(depth=depth),
            bucket=16,
            drafter=None,
            control=None,
            steps=20,
            explored=1,
            rows=280,
            tokens=900,
            seconds=0.9,
            work=0.9,
            overhead=0.002,
            expected=880.0,
        )
        return DecodingReported(
            job=self._job,
            worker=info.worker,
            incarnation=info.incarnation,
            rank=0,
            serial=self._serials[info.worker],
            step=step,
            purpose="train",
            tallies=(tally,),
        )

    def _finished(
        self, info: WorkerInfo, step: Step, prompt: PromptIndex, member: int
    ) -> RolloutFinished:
        length = min(4096, int(self._random.lognormvariate(6.0, 0.8)))
        return RolloutFinished(
            job=self._job,
            epoch=Epoch(1),
            step=step,
            attempt=Attempt(0),
            worker=info.worker,
            incarnation=info.incarnation,
            purpose="train",
            prompt=prompt,
            member=Member(member),
            answer=self._answers.append(_answer(length)),
            length=length,
            accepted=(),
            batch=16,
            decode_seconds=length / 60,
            stop="stop",
        )

    def _scored(self, step: Step, prompt: PromptIndex, member: int) -> RolloutScored:
        return RolloutScored(
            job=self._job,
            epoch=Epoch(1),
            step=step,
            attempt=Attempt(0),
            purpose="train",
            prompt=prompt,
            member=Member(member),
            length=1,
            reward=float(self._random.random() < 0.5),
        )

    def _idled(self, info: WorkerInfo, step: Step) -> WorkerIdled:
        return WorkerIdled(
            job=self._job,
            epoch=Epoch(1),
            step=step,
            attempt=Attempt(0),
            worker=info.worker,
            incarnation=info.incarnation,
            purpose="train",
            requeues=0,
        )
