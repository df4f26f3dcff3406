"""Run a compute process: one loop that handles messages, then computes to the next boundary.

Its worker starts it as `python -m tlt.ranks.main SOCKET PROGRESS SETUP`, and it ends with its
worker. An error either fails the job (`WorkerFailed`) or ends this process, which repairs nothing.
"""

import contextlib
import os
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from typing import assert_never

import msgspec
import torch

from tlt.base.id_types import NAMED, DrafterVersion, PolicyVersion
from tlt.base.interrupt_check import Interrupted
from tlt.blobs.blob_files import remove_unfinished
from tlt.errors import ConfigError, find_remedy
from tlt.models.tokenizer import Tokenizer
from tlt.protocol.commands import (
    AdoptDrafter,
    CloseJob,
    CutAnswers,
    MergeDrafter,
    OpenJob,
    PauseJob,
    StartRollout,
    StopDrafterTraining,
    TrainDrafter,
    UpdatePolicy,
)
from tlt.protocol.events import DrafterRefused, SizesChosen, WorkerFailed
from tlt.protocol.rank_messages import (
    BeginTrajectory,
    ContinueTrajectory,
    DecodePrompts,
    EndTrajectory,
    FromRank,
    PartialAnswer,
    PeerAnswer,
    RankReady,
    RankSetup,
    SharePartialAnswers,
    ToRank,
)
from tlt.protocol.refs import DrafterRef
from tlt.ranks.drafter.member import DrafterMember
from tlt.ranks.engine_factory import start_engine
from tlt.ranks.engine_requirements import select_device
from tlt.ranks.policy_update import PolicyUpdateDuty
from tlt.ranks.rank_job_context import RankJob
from tlt.ranks.return_free_memory import return_free_memory, return_memory_of_closed_job
from tlt.ranks.rollout import RolloutDuty
from tlt.ranks.size_choice import choose_for_rank
from tlt.ranks.worker_channel import Progress, RankChannel
from tlt.trainer import process_group as groups

# messages for ranks that have an engine
DecodingMessage = (
    StartRollout
    | CutAnswers
    | AdoptDrafter
    | TrainDrafter
    | MergeDrafter
    | StopDrafterTraining
    | DecodePrompts
    | BeginTrajectory
    | ContinueTrajectory
    | EndTrajectory
    | PeerAnswer
    | PartialAnswer
    | SharePartialAnswers
)
# messages after which a ConfigError is the job's, and fresh ranks would raise it again
_MAY_FAIL_JOB = (OpenJob, DecodePrompts, BeginTrajectory, ContinueTrajectory, UpdatePolicy)
# time until a rank without answers to learn from tries again
_RETRY_SECONDS = 0.05


class Decoding:
    """The parts of a rank that decode and train the drafter, on the rank's engine."""

    def __init__(self, job: RankJob, progress: Progress) -> None:
        self._job = job
        self._progress = progress
        tokenizer = Tokenizer(job.spec.policy.path)
        started = start_engine(job, tokenizer)
        # reason why the drafter that the spec names can't be used
        self.complaint = started.complaint
        self.engine = started.engine
        self.member: DrafterMember | None = None
        if job.spec.drafter.train != "off" and started.engine.capabilities.hidden_states:
            self.member = DrafterMember(job, started.engine, started.drafter)
        replay = None if self.member is None else self.member.replay
        self.rollout = RolloutDuty(job, self.engine, tokenizer, replay)

    @property
    def wait_seconds(self) -> float | None:
        """Return how long the rank may wait for a message (None: without limit)."""
        if self.engine.running > 0:
            return 0.0
        if self.member is None or not self.member.is_training:
            return None
        return _RETRY_SECONDS if self.member.lacks_answers else 0.0

    def handle(self, message: DecodingMessage) -> Sequence[FromRank]:
        """Follow a message, and return what is to be said at once."""
        member, rollout = self.member, self.rollout
        match message:
            case StartRollout():
                # weights of a large policy take long to read
                with self._progress.report_meanwhile():
                    rollout.start(message)
                self.engine.allow_speculation(message.speculate)
                if message.drafter is not None:
                    return self._adopt(message.drafter)
            case AdoptDrafter():
                return self._adopt(message.drafter)
            case TrainDrafter():
                if member is not None:
                    member.begin(message)
            case MergeDrafter():
                if member is not None:
                    member.request_merge(message)
            case StopDrafterTraining():
                if member is not None:
                    return member.stop(message.training_session)
            case DecodePrompts():
                return rollout.submit(message.prompts)
            case BeginTrajectory():
                return rollout.trajectories.begin(message)
            case ContinueTrajectory():
                return rollout.trajectories.go_on(message)
            case EndTrajectory():
                return rollout.end(message)
            case CutAnswers():
                return rollout.cut()
            case PeerAnswer() | PartialAnswer():
                rollout.add_answer(message)
            case SharePartialAnswers():
                return [rollout.partial_answers()]
            case _:
                assert_never(message)
        return []

    def refuse_drafter(self, version: DrafterVersion, complaint: str) -> DrafterRefused:
        return DrafterRefused(**self._job.reporter, error=complaint, version=version)

    def _adopt(self, ref: DrafterRef | None) -> Sequence[FromRank]:
        if self.member is None:
            return []
        # a large drafter takes long to send
        with self._progress.report_meanwhile():
            complaint = self.member.in_use.adopt(ref)
        if complaint is None or ref is None:
            return []
        return [self.refuse_drafter(ref.version, complaint)]


class JobDuties:
    """The parts of a rank that work for the open job."""

    def __init__(self, job: RankJob, progress: Progress) -> None:
        self.job = job
        self._progress = progress
        # None: the rank's device computes for another rank's engine
        self.decoding: Decoding | None = None
        if job.setup.rank % job.spec.rollout.tensor_parallel == 0:
            self.decoding = Decoding(job, progress)
        self._update: PolicyUpdateDuty | None = None

    @property
    def update(self) -> PolicyUpdateDuty:
        """Return the policy's trainer, which starts when it is first needed."""
        if self._update is None:
            self._update = PolicyUpdateDuty(self.job, self._progress)
        return self._update

    @property
    def wait_seconds(self) -> float | None:
        """Return how long the rank may wait for a message (None: without limit)."""
        return None if self.decoding is None else self.decoding.wait_seconds


class Rank:
    """The rank's loop, and the handling of each message."""

    def __init__(self, setup: RankSetup, channel: RankChannel, progress: Progress) -> None:
        self._setup = setup
        self._channel = channel
        self._progress = progress
        self.duties: JobDuties | None = None
        # True until the memory of a closed job is returned
        self._has_closed = False
        select_device(torch.device(setup.device))

    def run(self) -> None:
        """Handle messages and compute until the worker has ended (EOFError)."""
        while True:
            wait = None if self.duties is None else self.duties.wait_seconds
            for message in self._channel.receive(wait=wait):
                self.handle(message)
            # here, because the callers of `_close` hold what is to be freed
            if self._has_closed:
                self._free()
            self.compute()

    def handle(self, message: ToRank) -> None:
        """Handle one message; messages for another job than the open one change nothing."""
        try:
            if isinstance(message, OpenJob):
                self._open(message)
            elif self.duties is not None and self.duties.job.id == message.job:
                self._dispatch(self.duties, message)
        except ConfigError as error:
            if not isinstance(message, _MAY_FAIL_JOB):
                raise  # fresh ranks may do better: the incarnation ends, the job goes on
            setup = self._setup
            self._send(
                WorkerFailed(
                    job=message.job,
                    worker=setup.worker,
                    incarnation=setup.incarnation,
                    error=str(error),
                )
            )

    def compute(self) -> None:
        """Compute to the next boundary: a decode step, or a piece of drafter training."""
        decoding = None if self.duties is None else self.duties.decoding
        if decoding is None:
            return
        if decoding.engine.running:
            self._send(*decoding.rollout.step())
            if (report := decoding.rollout.report(time.monotonic())) is not None:
                self._send(report)
        elif decoding.member is not None and decoding.member.is_training:
            with contextlib.suppress(Interrupted):
                self._send(*decoding.member.step(self._check_interrupt))
        self._progress.report(decoding.engine.running)

    def _dispatch(self, duties: JobDuties, message: ToRank) -> None:
        match message:
            case OpenJob():
                raise AssertionError("a job is open")
            case CloseJob():
                self._close(duties)
                shutil.rmtree(duties.job.flight, ignore_errors=True)
            case UpdatePolicy():
                self._update_policy(duties, message)
            case _:
                if duties.decoding is not None:
                    self._send(*duties.decoding.handle(message))

    def _open(self, command: OpenJob) -> None:
        if self.duties is not None:
            self._close(self.duties)
        if self._has_closed:
            self._free()
        with self._progress.report_meanwhile():
            remove_unfinished(RankJob(self._setup, command).flight)
            command, choice = choose_for_rank(self._setup, command)
            job = RankJob(self._setup, command)
            self.duties = JobDuties(job, self._progress)
        decoding = self.duties.decoding
        if decoding is not None and choice is not None:
            self._send(
                SizesChosen(
                    **job.reporter, rank=self._setup.rank, sizes=choice.sizes, why=choice.why
                )
            )
        if decoding is not None and decoding.complaint is not None:
            self._send(decoding.refuse_drafter(NAMED, decoding.complaint))

    def _close(self, duties: JobDuties) -> None:
        self.duties, self._has_closed = None, True
        if duties.decoding is not None:
            duties.decoding.engine.close()

    def _free(self) -> None:
        self._has_closed = False
        return_memory_of_closed_job(torch.device(self._setup.device))

    def _update_policy(self, duties: JobDuties, command: UpdatePolicy) -> None:
        device, decoding = duties.job.device, duties.decoding
        # on a CPU there is room, and zeroing the memory again takes time
        if device.type == "cuda":
            if decoding is not None:
                decoding.engine.release_memory()
            return_free_memory(device)
        events = duties.update.run(command)
        # a rank that holds a part of each weight decodes with what the first rank publishes, and
        # one whose next answers have the weights of the step before with those that it has
        older = duties.job.spec.algorithm.staleness > 0
        if decoding is not None and not (duties.update.is_sharded or older):
            version = PolicyVersion(command.version + 1)
            with self._progress.report_meanwhile():
                decoding.rollout.swap_weights(version, duties.update.learner.weights())
        return_free_memory(device)
        self._send(*events)

    def _check_interrupt(self) -> None:
        """Raise Interrupted if a message has arrived that can't wait."""
        self._progress.report(0)
        self._channel.read_available()
        if self._channel.has_urgent:
            raise Interrupted

    def _send(self, *messages: FromRank) -> None:
        for message in messages:
            self._channel.send(message)


def main() -> None:
    """Run the rank that the arguments describe."""
    channel, progress = RankChannel(int(sys.argv[1])), Progress(int(sys.argv[2]))
    setup = msgspec.json.decode(sys.argv[3], type=RankSetup)
    torch.set_num_threads(1)
    # The store has to exist as long as this process, because other ranks meet there.
    store, port = groups.serve_rendezvous(setup.host)
    channel.send(RankReady(rendezvous=f"{setup.host}:{port}"))
    rank: Rank | None = None
    try:
        rank = Rank(setup, channel, progress)
        rank.run()
    except EOFError:
        return
    except Exception as error:
        remedy = find_remedy(error)
        if rank is not None and rank.duties is not None and remedy is not None:
            job, shortage = rank.duties.job.id, f"{error}. {remedy}"
            channel.send(PauseJob(job=job, shortage=shortage))
        # The worker reports the last line of this output, so nothing may follow it.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    finally:
        del store


if __name__ == "__main__":
    main()
