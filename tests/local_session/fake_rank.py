"""Run a rank without torch: `python -m tests.local_session.fake_rank SOCKET PROGRESS SETUP`.

It takes the messages of `tlt.ranks.main` by the same channel, writes answers and blobs by the same
code, and ends as a rank does: with its worker, or by an error that its worker reports.
"""

import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.local_session.fake_collective import serve
from tests.local_session.fake_member import FakeMember, accepted_counts
from tests.local_session.fake_policy import (
    INITIAL,
    FakeTrainer,
    answer_limit,
    read_weights,
    write_answer,
)
from tests.local_session.gates import Gates
from tlt.base.id_types import NAMED, PolicyVersion, Purpose, Step
from tlt.blobs.answer_files import Answer, AnswerFiles, pack_logprobs, pack_origins, pack_tokens
from tlt.blobs.blob_files import blobs_of_run
from tlt.errors import find_remedy
from tlt.protocol.commands import (
    AdoptDrafter,
    CloseJob,
    CutAnswers,
    MergeDrafter,
    OpenJob,
    PauseJob,
    PromptIssued,
    StartRollout,
    StopDrafterTraining,
    TrainDrafter,
    UpdatePolicy,
)
from tlt.protocol.events import (
    DrafterRefused,
    RolloutCut,
    RolloutFinished,
    WorkerFailed,
)
from tlt.protocol.rank_messages import (
    DecodePrompts,
    FromRank,
    PartialAnswer,
    PartialAnswers,
    PeerAnswer,
    RankReady,
    RankSetup,
    SharePartialAnswers,
    ToRank,
)
from tlt.protocol.refs import BatchSpan, DrafterRef, DrafterSpan, OriginSpan, PolicyRef, PolicySpan
from tlt.ranks.worker_channel import Progress, RankChannel
from tlt.spec.config import JobSpec

# tokens that an answer grows by in a decode step
_TOKENS_A_STEP = 8
_RETRY_SECONDS = 0.02
# where this file lies beside the session's folder in shared memory, no policy can be loaded
REFUSE_JOBS = "refuse-jobs"


class _Running(msgspec.Struct):
    """An answer that is being written."""

    prompt: PromptIssued
    tokens: list[int]
    written: int = 0
    shared: int = 0


class FakeJob:
    """Hold what a rank has of the open job."""

    def __init__(self, setup: RankSetup, opened: OpenJob) -> None:
        self.opened = opened
        self.flight = Path(setup.flight) / opened.job
        blobs = blobs_of_run(Path(opened.folder), self.flight)
        self.trainer = FakeTrainer(opened, blobs, setup.rank)
        self.member = FakeMember(setup, opened, blobs)
        self.running: list[_Running] = []
        self.waiting: list[_Running] = []
        # the rollout batch that it was last assigned to
        self.batch: tuple[Step, Purpose] = Step(0), "train"
        self._version = PolicyVersion(0)
        self._weights = INITIAL
        self._blobs = blobs
        self._answers = AnswerFiles(Path(opened.folder))
        self._writer = self._answers.writer(self.member.name)
        self._reporter = {
            "job": opened.job,
            "worker": setup.worker,
            "incarnation": setup.incarnation,
        }

    @property
    def spec(self) -> JobSpec:
        return self.opened.spec

    @property
    def version(self) -> PolicyVersion:
        return self._version

    def use_policy(self, policy: PolicyRef) -> None:
        if policy.version != self._version:
            known = policy.weights
            self._weights = INITIAL if known is None else read_weights(self._blobs, known)
            self._version = policy.version

    def decode_with(self, version: PolicyVersion, weights: str) -> None:
        self._version, self._weights = version, weights

    def submit(self, prompts: Sequence[PromptIssued]) -> Iterator[RolloutCut]:
        for prompt in prompts:
            if self.spec.algorithm.staleness and (prompt.step, prompt.purpose) != self.batch:
                yield self._cut(_Running(prompt, []))
                continue
            tokens, prefix = write_answer(self.spec, prompt, self._weights), list[int]()
            if prompt.prefix is not None:
                prefix = self._answers.read(prompt.prefix).tokens
            tokens = [*prefix, *tokens[len(prefix) :]]
            self.waiting.append(_Running(prompt, tokens, written=len(prefix)))

    def cut(self) -> list[RolloutCut]:
        """Give up the answers to training prompts, and keep what is written of them."""
        cut = [each for each in self.running + self.waiting if each.prompt.purpose == "train"]
        self.running = [each for each in self.running if each not in cut]
        self.waiting = [each for each in self.waiting if each not in cut]
        return [self._cut(each) for each in cut]

    def _cut(self, each: _Running) -> RolloutCut:
        prompt, answer = each.prompt, each.prompt.prefix
        if each.written and not self.spec.rollout.defer_long:
            each.tokens = each.tokens[: each.written]
            answer = self._writer.append(self._answer(each, 1))
        return RolloutCut(
            **self._reporter,
            epoch=prompt.epoch,
            step=prompt.step,
            attempt=prompt.attempt,
            purpose=prompt.purpose,
            prompt=prompt.prompt,
            member=prompt.member,
            answer=answer,
            decode_seconds=0.001 * each.written,
            excused=prompt.excused,
        )

    def decode(self) -> list[RolloutFinished]:
        """Make one decode step, and return the answers that it finished."""
        while self.waiting and len(self.running) < self.spec.rollout.slots:
            self.running.append(self.waiting.pop(0))
        batch = len(self.running)
        for each in self.running:
            each.written = min(each.written + _TOKENS_A_STEP, len(each.tokens))
        done = [each for each in self.running if each.written == len(each.tokens)]
        self.running = [each for each in self.running if each.written < len(each.tokens)]
        return [self._finish(each, batch) for each in done]

    def _finish(self, each: _Running, batch: int) -> RolloutFinished:
        prompt, count = each.prompt, len(each.tokens)
        self.member.add_tokens("own", count)
        return RolloutFinished(
            **self._reporter,
            epoch=prompt.epoch,
            step=prompt.step,
            attempt=prompt.attempt,
            purpose=prompt.purpose,
            prompt=prompt.prompt,
            member=prompt.member,
            answer=self._writer.append(self._answer(each, batch)),
            length=count,
            accepted=accepted_counts(self.member.used, count),
            batch=batch,
            decode_seconds=0.001 * count,
            stop="length" if count >= answer_limit(self.spec, prompt) else "stop",
            prompt_length=len(prompt.tokens),
        )

    def _answer(self, each: _Running, batch: int) -> Answer:
        tokens, rollout, used = each.tokens, self.spec.rollout, self.member.used
        count = len(tokens)
        drafter = None if used is None else used.version
        return Answer(
            prompt=each.prompt.tokens,
            token_bytes=pack_tokens(tokens),
            logprob_bytes=pack_logprobs([-0.7] * count),
            text="".join(map(str, tokens)),
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
            policies=(PolicySpan(version=self._version, tokens=count),),
            drafters=(DrafterSpan(version=drafter, tokens=count),),
            origin_bytes=pack_origins([OriginSpan(origin="plain", tokens=count)]),
            batches=(BatchSpan(size=batch, tokens=count),),
        )

    def partial_answers(self) -> PartialAnswers:
        found: list[PartialAnswer] = []
        for each in self.running:
            if each.prompt.purpose == "train" and each.written > 1.5 * each.shared:
                each.shared = each.written
                prompt = each.prompt
                found.append(
                    PartialAnswer(
                        job=prompt.job,
                        step=prompt.step,
                        purpose=prompt.purpose,
                        prompt=prompt.prompt,
                        member=prompt.member,
                        prompt_tokens=prompt.tokens,
                        token_bytes=pack_tokens(each.tokens[: each.written]),
                    )
                )
        return PartialAnswers(job=self.opened.job, answers=tuple(found))

    def adopt(self, drafter: DrafterRef | None) -> Iterator[FromRank]:
        complaint = self.member.adopt(drafter)
        if complaint is not None and drafter is not None:
            yield DrafterRefused(**self._reporter, error=complaint, version=drafter.version)

    def check_named_drafter(self) -> Iterator[FromRank]:
        path = self.spec.drafter.path
        if path is not None and not Path(path).is_dir():
            error = f"{path}: no such folder"
            yield DrafterRefused(**self._reporter, error=error, version=NAMED)

    def failed(self, error: str) -> WorkerFailed:
        return WorkerFailed(**self._reporter, error=error)


class FakeRank:
    """The rank's loop, and the handling of each message."""

    def __init__(self, setup: RankSetup, channel: RankChannel, progress: Progress) -> None:
        self.job: FakeJob | None = None
        self._setup = setup
        self._channel = channel
        self._progress = progress
        self._gates = Gates(Path(setup.flight))

    def run(self) -> None:
        while True:
            for message in self._channel.receive(wait=self._wait_seconds()):
                for reply in self._handle(message):
                    self._channel.send(reply)
            self._compute()

    def _wait_seconds(self) -> float | None:
        job = self.job
        if job is None:
            return None
        if job.running or job.waiting:
            return 0.0
        if not job.member.is_training:
            return None
        return _RETRY_SECONDS if job.member.lacks_answers else 0.0

    def _compute(self) -> None:
        job = self.job
        if job is None:
            return
        if job.running or job.waiting:
            prompt = (job.running or job.waiting)[0].prompt
            # the worker sees what runs while the rank stands at the gate
            self._progress.report(len(job.running) + len(job.waiting))
            self._pass(f"{prompt.purpose}-{prompt.step}")
            for finished in job.decode():
                self._channel.send(finished)
                self._pass(f"{prompt.purpose}-{prompt.step}-answered")
        elif job.member.is_training:
            self._pass("drafter")
            for event in job.member.step(job.version):
                self._channel.send(event)
        self._progress.report(len(job.running))

    def _pass(self, gate: str) -> None:
        who = f"{self._setup.worker}.{self._setup.rank}"
        self._gates.wait(gate, who)
        self._gates.wait(f"{gate}-{self._setup.worker}", who)

    def _handle(self, message: ToRank) -> Iterator[FromRank]:
        job = self.job
        if isinstance(message, OpenJob):
            yield from self._open(message)
        elif job is not None and job.opened.job == message.job:
            yield from self._dispatch(job, message)

    def _open(self, command: OpenJob) -> Iterator[FromRank]:
        self.job = FakeJob(self._setup, command)
        if Path(self._setup.flight).with_name(REFUSE_JOBS).exists():
            yield self.job.failed(f"{command.spec.policy.path}: it can't be loaded")
        yield from self.job.check_named_drafter()

    def _dispatch(self, job: FakeJob, message: Any) -> Iterator[FromRank]:
        match message:
            case CloseJob():
                self.job = None
                shutil.rmtree(job.flight, ignore_errors=True)
            case StartRollout():
                job.batch = message.step, message.purpose
                job.use_policy(message.policy)
                if message.drafter is not None:
                    yield from job.adopt(message.drafter)
            case AdoptDrafter():
                yield from job.adopt(message.drafter)
            case CutAnswers():
                yield from job.cut()
            case DecodePrompts():
                yield from job.submit(message.prompts)
            case PeerAnswer():
                job.member.add_tokens("others", message.answer.bytes)
            case PartialAnswer():
                job.member.add_tokens("unfinished", len(message.token_bytes) // 4)
            case SharePartialAnswers():
                yield job.partial_answers()
            case TrainDrafter():
                job.member.begin(message)
            case MergeDrafter():
                job.member.request_merge(message)
            case StopDrafterTraining():
                self._pass("stop")
                yield from job.member.stop(message.training_session)
            case UpdatePolicy():
                yield from self._update(job, message)
            case _:
                raise AssertionError(f"unknown message {message}")

    def _update(self, job: FakeJob, command: UpdatePolicy) -> Iterator[FromRank]:
        self._pass(f"update-{command.version}")
        with self._progress.report_meanwhile():
            events = job.trainer.update(command)
        self._pass(f"updated-{command.version}")
        if not (job.trainer.is_sharded or job.spec.algorithm.staleness):
            job.decode_with(job.trainer.version, job.trainer.weights)
        yield from events


def main() -> None:
    channel, progress = RankChannel(int(sys.argv[1])), Progress(int(sys.argv[2]))
    setup = msgspec.json.decode(sys.argv[3], type=RankSetup)
    channel.send(RankReady(rendezvous=serve(setup.host)))
    rank = FakeRank(setup, channel, progress)
    try:
        rank.run()
    except EOFError:
        return
    except Exception as error:
        remedy = find_remedy(error)
        if rank.job is not None and remedy is not None:
            shortage = f"{error}. {remedy}"
            channel.send(PauseJob(job=rank.job.opened.job, shortage=shortage))
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
