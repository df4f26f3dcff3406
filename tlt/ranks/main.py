"""The compute process: one loop that takes commands at a boundary, computes to the next, reports.

Started by its worker as `python -m tlt.ranks.main SOCKET PROGRESS DEVICE HOST`. It ends when its
worker does. Whatever it cannot do is either the job's fault (`Refused`) or the end of this process:
nothing is repaired in here.
"""

import contextlib
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import assert_never

import torch

from tlt.blobs import Blobs
from tlt.engine.native import NativeEngine
from tlt.errors import ConfigError
from tlt.ids import NAMED, DrafterVersion, JobId
from tlt.interrupt import Interrupted
from tlt.models.tokenizer import Tokenizer
from tlt.protocol.events import DrafterRefused
from tlt.ranks.drafter_trainer import DrafterTrainer
from tlt.ranks.engine_factory import context_of, start_engine
from tlt.ranks.policy_update import PolicyUpdateDuty
from tlt.ranks.rollout import RolloutDuty
from tlt.ranks.worker_channel import (
    Decode,
    Dismiss,
    Load,
    Merge,
    PeerAnswer,
    Plain,
    Progress,
    RankChannel,
    Ready,
    Refused,
    School,
    SharePartialAnswers,
    SwapDrafter,
    SwapPolicy,
    ToRank,
    Train,
    Unload,
)
from tlt.trainer import process_group as groups

# between two looks for something to learn from
_HUNGRY_SECONDS = 0.05


class Job:
    """What a rank holds for the job in hand; the trainer is brought up when it is first needed."""

    def __init__(
        self, load: Load, device: torch.device, progress: Progress, channel: RankChannel
    ) -> None:
        spec = load.spec
        self.id = load.job
        self.flight = load.flight
        self._load = load
        self._device = device
        self._progress = progress
        self._blobs = Blobs(Path(load.flight), Path(load.committed))
        tokenizer = Tokenizer(spec.policy.path)
        started = start_engine(load, tokenizer, device)
        if started.complaint is not None:
            channel.send(refused(load, NAMED, started.complaint))
        self.draft: DrafterTrainer | None = None
        engine = started.engine
        if spec.drafter.train != "off" and isinstance(engine, NativeEngine):
            self.draft = DrafterTrainer(load, engine, started.drafter, self._blobs)
        self.rollout = RolloutDuty(
            load,
            engine,
            tokenizer.stop_tokens(),
            context_of(load),
            self._blobs,
            None if self.draft is None else self.draft.pool,
        )
        self._learn: PolicyUpdateDuty | None = None

    @property
    def patience(self) -> float | None:
        """How long it may wait for a command; None if there is nothing else to do."""
        if self.rollout.engine.running > 0:
            return 0.0
        if self.draft is None or not self.draft.active:
            return None
        return _HUNGRY_SECONDS if self.draft.hungry else 0.0

    @property
    def learn(self) -> PolicyUpdateDuty:
        if self._learn is None:
            self._learn = PolicyUpdateDuty(self._load, self._device, self._blobs, self._progress)
        return self._learn

    def close(self) -> None:
        self.rollout.engine.close()


class Rank:
    def __init__(self, channel: RankChannel, progress: Progress, device: torch.device) -> None:
        self._channel = channel
        self._progress = progress
        self._device = device
        self._job: Job | None = None

    def run(self) -> None:
        while True:
            for command in self._channel.receive(wait=self._patience):
                self._obey(command)
            if self._job is not None:
                self._work(self._job)

    @property
    def _patience(self) -> float | None:
        return None if self._job is None else self._job.patience

    def _work(self, job: Job) -> None:
        if job.rollout.engine.running:
            for rollout in job.rollout.step():
                self._channel.send(rollout)
            if (chosen := job.rollout.strategies(time.monotonic())) is not None:
                self._channel.send(chosen)
        elif job.draft is not None and job.draft.active:
            self._train_drafter(job.draft)
        self._progress.report(job.rollout.engine.running)

    def _train_drafter(self, draft: DrafterTrainer) -> None:
        """Until it is through with something, or the next command arrives."""
        with contextlib.suppress(Interrupted):
            for frame in draft.step(self._look):
                self._channel.send(frame)

    def _look(self) -> None:
        self._progress.report(0)
        if self._channel.commanded():
            raise Interrupted

    def _obey(self, command: ToRank) -> None:
        match command:
            case Load():
                self._close()
                try:
                    with self._progress.made():
                        self._job = Job(command, self._device, self._progress, self._channel)
                except ConfigError as error:
                    self._channel.send(Refused(job=command.job, error=str(error)))
            case Unload():
                self._unload()
            case SwapPolicy():
                if job := self._current(command.job):
                    job.rollout.swap(command.policy)
            case SwapDrafter():
                if (job := self._current(command.job)) and job.draft is not None:
                    self._adopt(job.draft, command)
            case SharePartialAnswers():
                if job := self._current(command.job):
                    self._channel.send(job.rollout.growing())
            case School():
                if (job := self._current(command.train.job)) and job.draft is not None:
                    job.draft.begin(command)
            case Merge():
                if (job := self._current(command.merge.job)) and job.draft is not None:
                    job.draft.ask(command)
            case Dismiss():
                if (job := self._current(command.job)) and job.draft is not None:
                    for frame in job.draft.dismiss(command.training_session, command.sent):
                        self._channel.send(frame)
            case Decode():
                if job := self._current(command.prompts[0].job):
                    self._decode(job, command)
            case PeerAnswer():
                if job := self._current(command.job):
                    job.rollout.overhear(command)
            case Plain():
                if job := self._current(command.job):
                    job.rollout.engine.stop_speculating()
            case Train():
                if job := self._current(command.learn.job):
                    self._train(job, command)
            case _:
                assert_never(command)

    def _adopt(self, draft: DrafterTrainer, command: SwapDrafter) -> None:
        complaint = draft.adopt(command.drafter)
        if complaint is not None and command.drafter is not None:
            self._channel.send(refused(draft.load, command.drafter.version, complaint))

    def _decode(self, job: Job, command: Decode) -> None:
        try:
            job.rollout.submit(command.prompts)
        except ConfigError as error:
            self._channel.send(Refused(job=job.id, error=str(error)))

    def _train(self, job: Job, command: Train) -> None:
        try:
            trained = job.learn.train(command)
        except ConfigError as error:
            self._channel.send(Refused(job=job.id, error=str(error)))
            return
        job.rollout.adopt(trained.version, job.learn.learner.weights())
        self._channel.send(trained)

    def _current(self, job: JobId) -> Job | None:
        return self._job if self._job is not None and self._job.id == job else None

    def _unload(self) -> None:
        """The job has ended: what was handed in late is nobody's."""
        job = self._job
        self._close()
        if job is not None:
            shutil.rmtree(job.flight, ignore_errors=True)

    def _close(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None


def refused(load: Load, version: DrafterVersion, complaint: str) -> DrafterRefused:
    return DrafterRefused(
        job=load.job,
        worker=load.worker,
        incarnation=load.incarnation,
        error=complaint,
        version=version,
    )


def main() -> None:
    channel = RankChannel(int(sys.argv[1]))
    progress = Progress(int(sys.argv[2]))
    device = torch.device(sys.argv[3])
    host = sys.argv[4]
    torch.set_num_threads(1)
    # The store lives as long as this process: other ranks meet there.
    store, port = groups.serve_rendezvous(host)
    channel.send(Ready(rendezvous=f"{host}:{port}"))
    try:
        Rank(channel, progress, device).run()
    except EOFError:
        return
    except Exception:
        # its last line is what the worker reports: nothing may speak after it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    finally:
        del store


if __name__ == "__main__":
    main()
