"""Compute a rank's part of a policy update; afterwards all ranks of the job hold equal weights."""

import time
from contextlib import ExitStack
from typing import TypedDict

from torch.distributed import ProcessGroup

from tlt.id_types import Attempt, Epoch, JobId, PolicyVersion, Step
from tlt.models.safetensors_io import put_weights, read_weights
from tlt.protocol.commands import UpdatePolicy
from tlt.protocol.events import (
    CheckpointCommitted,
    PolicyPublished,
    PolicyUpdateFinished,
    RolloutFinished,
)
from tlt.protocol.refs import Checkpoint, MinibatchShare, PolicyRef
from tlt.protocol.shared_values import UpdateMetrics
from tlt.ranks.rank_job_context import RankJob
from tlt.ranks.worker_channel import Progress
from tlt.trainer import process_group as groups
from tlt.trainer.policy.policy_learner import PolicyLearner
from tlt.trainer.policy.samples import Minibatch, PolicySample

UpdateEvent = CheckpointCommitted | PolicyPublished | PolicyUpdateFinished


class _Origin(TypedDict):
    job: JobId
    epoch: Epoch
    step: Step
    attempt: Attempt


class PolicyUpdateDuty:
    """The policy's trainer in this rank."""

    def __init__(self, job: RankJob, progress: Progress) -> None:
        spec = job.spec
        self._job = job
        self._blobs = job.blobs()
        self._progress = progress
        # reading the model, building kernels and measuring take long
        with progress.report_meanwhile():
            self.learner = PolicyLearner(
                spec.policy.path,
                spec.algorithm,
                spec.policy.max_context,
                job.device,
                progress.report_meanwhile,
            )

    def run(
        self, command: UpdatePolicy, minibatches: tuple[tuple[RolloutFinished, ...], ...]
    ) -> list[UpdateEvent]:
        """Make one update; the first rank of all publishes the weights."""
        began = time.monotonic()
        rank = command.first_rank + self._job.setup.rank
        with ExitStack() as stack:
            # The first ranks to join wait while the others start their trainers.
            with self._progress.report_meanwhile():
                group = self._join(stack, command, rank)
            if command.restore is not None:
                self._restore(command.restore)
            if command.sync_from is not None and group is not None:
                self.learner.broadcast(command.sync_from, group)
            samples = [
                self._minibatch(share, rollouts)
                for share, rollouts in zip(command.minibatches, minibatches, strict=True)
            ]
            metrics = self.learner.update(
                command.version, samples, group, lambda: self._progress.report(0)
            )
        published = self._publish(command, metrics) if rank == 0 else []
        finished = PolicyUpdateFinished(
            **_origin(command),
            worker=command.worker,
            incarnation=command.incarnation,
            version=PolicyVersion(command.version + 1),
            seconds=time.monotonic() - began,
        )
        return [*published, finished]

    def _join(self, stack: ExitStack, command: UpdatePolicy, rank: int) -> ProcessGroup | None:
        if command.world == 1:
            return None
        stack.callback(groups.leave_group)
        timeout = self._job.spec.algorithm.collective_timeout_seconds
        return groups.join_group(
            command.rendezvous, command.group, rank, command.world, timeout, self._job.device
        )

    def _minibatch(self, share: MinibatchShare, rollouts: tuple[RolloutFinished, ...]) -> Minibatch:
        refs = share.ranks[self._job.setup.rank]
        return Minibatch(
            samples=[
                self._sample(rollout, ref.advantage)
                for ref, rollout in zip(refs, rollouts, strict=True)
            ],
            total_tokens=share.total_tokens,
            total_sequences=share.total_sequences,
        )

    def _sample(self, rollout: RolloutFinished, advantage: float) -> PolicySample:
        answer = self._job.answers.read(rollout.answer)
        return PolicySample(
            prompt=answer.prompt,
            completion=tuple(answer.tokens),
            logprobs=tuple(answer.logprobs),
            temperature=answer.temperature,
            advantage=advantage,
        )

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.learner.load_weights(read_weights(self._blobs, checkpoint.weights))
        self.learner.load_optimiser_state(read_weights(self._blobs, checkpoint.optimiser))

    def _publish(self, command: UpdatePolicy, metrics: UpdateMetrics) -> list[UpdateEvent]:
        version, commit = PolicyVersion(command.version + 1), command.checkpoint
        weights = put_weights(self._blobs, self.learner.weights(), commit=commit)
        policy = PolicyRef(version=version, weights=weights)
        published = PolicyPublished(**_origin(command), policy=policy, metrics=metrics)
        if not commit:
            return [published]
        optimiser = put_weights(self._blobs, self.learner.optimiser_state(), commit=True)
        checkpoint = Checkpoint(version=version, weights=weights, optimiser=optimiser)
        return [CheckpointCommitted(**_origin(command), checkpoint=checkpoint), published]


def _origin(command: UpdatePolicy) -> _Origin:
    return _Origin(job=command.job, epoch=command.epoch, step=command.step, attempt=command.attempt)
