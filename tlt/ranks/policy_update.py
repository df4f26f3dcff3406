"""Compute a rank's part of a policy update; afterwards all ranks of the job hold equal weights.

Where the ranks split one copy, their group stays for the next update; otherwise each update forms a
group of its own.
"""

import gc
from contextlib import ExitStack
from typing import TypedDict

from torch.distributed import ProcessGroup

from tlt.base.id_types import Attempt, Epoch, JobId, PolicyVersion, Step
from tlt.protocol.commands import UpdatePolicy
from tlt.protocol.events import CheckpointCommitted, PolicyPublished, PolicyUpdateFinished
from tlt.protocol.refs import Checkpoint, MinibatchShare, PolicyRef, SampleRef
from tlt.protocol.shared_values import UpdateMetrics
from tlt.ranks.policy_files import PolicyFiles
from tlt.ranks.rank_job_context import RankJob
from tlt.ranks.worker_channel import Progress
from tlt.trainer import collectives
from tlt.trainer import process_group as groups
from tlt.trainer.policy.model.micro_batches import Minibatch, PolicySample
from tlt.trainer.policy.model.trained_part import TrainedPart
from tlt.trainer.policy.policy_learner import PolicyLearner

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
        self._files = PolicyFiles(job)
        self._progress = progress
        self._sharded = spec.algorithm.shards != 1
        # the group whose ranks split one copy
        self._group: ProcessGroup | None = None
        self._learner: PolicyLearner | None = None
        if not self._sharded:
            self._learner = self._load(None)

    @property
    def learner(self) -> PolicyLearner:
        assert self._learner is not None, "the first update forms the group of the shards"
        return self._learner

    @property
    def is_sharded(self) -> bool:
        return self._sharded

    def _load(self, group: ProcessGroup | None) -> PolicyLearner:
        spec, busy = self._job.spec, self._progress.report_meanwhile
        policy, device = spec.policy, self._job.device
        path, context = policy.path, policy.max_context
        part = TrainedPart(lora=policy.lora, freeze=policy.freeze, seed=spec.seed)
        # reading the model, building kernels and measuring take long
        with busy():
            if group is None:
                return PolicyLearner(path, spec.algorithm, context, device, busy, part=part)
            return PolicyLearner(path, spec.algorithm, context, device, busy, group)

    def run(self, command: UpdatePolicy) -> list[UpdateEvent]:
        """Make one update; the first rank of all publishes the weights."""
        rank = command.first_rank + self._job.setup.rank
        with ExitStack() as stack:
            group = self._prepare(stack, command, rank)
            minibatches = [self._minibatch(share, command.version) for share in command.minibatches]
            metrics = self.learner.update(
                command.version, minibatches, group, lambda: self._progress.report(0)
            )
            self._files.release_restored()  # all ranks were at the update's collectives
            published = self._publish(command, metrics, rank)
        finished = PolicyUpdateFinished(
            **_origin(command),
            worker=command.worker,
            incarnation=command.incarnation,
            version=PolicyVersion(command.version + 1),
        )
        return [*published, finished]

    def _prepare(self, stack: ExitStack, command: UpdatePolicy, rank: int) -> ProcessGroup | None:
        """Bring all ranks to the version that the update starts from."""
        if self._sharded:
            if command.reload:
                self._group, self._learner = self._join(command, rank), None
                # the one before refers to itself; two don't fit
                gc.collect()
                self._learner = self._load(self._group)
            group = self._group
        else:
            stack.callback(groups.leave_group)
            group = self._join(command, rank)
        if self._job.spec.rollout.tensor_parallel > 1:
            # an engine's first rank has freed the cache on all of its devices before it comes here
            collectives.wait_for_all(group, self._job.device)
        if command.restore is not None:
            with self._progress.report_meanwhile():
                self._files.restore(self.learner, command.restore, self._group)
        if command.sync_from is not None and group is not None:
            self.learner.broadcast(command.sync_from, group)
        return group

    def _join(self, command: UpdatePolicy, rank: int) -> ProcessGroup | None:
        timeout = self._job.spec.algorithm.collective_timeout_seconds
        # the first ranks to join wait while the others start their trainers
        with self._progress.report_meanwhile():
            return groups.join_group(
                command.rendezvous, command.group, rank, command.world, timeout, self._job.device
            )

    def _minibatch(self, share: MinibatchShare, version: PolicyVersion) -> Minibatch:
        return Minibatch(
            samples=[
                sample
                for ref in share.ranks[self._job.setup.rank]
                for sample in self._samples(ref, version)
            ],
            total_tokens=share.total_tokens,
            total_sequences=share.total_sequences,
        )

    def _samples(self, ref: SampleRef, version: PolicyVersion) -> list[PolicySample]:
        """Return an answer's conversations, which have its advantage; most answers have one."""
        answer = self._job.answers.read(ref.answer)
        parts = (answer, *answer.branches)
        drawn = sum(len(part.logprobs) for part in parts)
        return [
            PolicySample(
                prompt=part.prompt,
                completion=tuple(part.tokens),
                logprobs=tuple(part.logprobs),
                temperature=part.temperature,
                advantage=ref.advantage,
                reward=ref.reward,
                group=ref.prompt,
                drawn_by_policy=all(span.version == version for span in part.policies),
                turns=part.policy_turns,
                answer_tokens=drawn,
            )
            for part in parts
        ]

    def _publish(
        self, command: UpdatePolicy, metrics: UpdateMetrics, rank: int
    ) -> list[UpdateEvent]:
        """Publish the weights, and save a checkpoint if that is due; the first rank reports it."""
        version, commit = PolicyVersion(command.version + 1), command.checkpoint
        name = f"{command.epoch}.{command.attempt}.{command.version}"
        with self._progress.report_meanwhile():
            weights = self._files.put_weights(self.learner, rank, commit)
            adapter = self._files.put_adapter(self.learner, rank, commit)
            saved = None
            if commit:
                saved = self._files.put_optimiser(self.learner, rank, self._group, name)
        if weights is None:
            return []
        policy = PolicyRef(version=version, weights=weights, adapter=adapter)
        published = PolicyPublished(**_origin(command), policy=policy, metrics=metrics)
        if saved is None:
            return [published]
        checkpoint = Checkpoint(version=version, weights=weights, adapter=adapter, **saved)
        return [CheckpointCommitted(**_origin(command), checkpoint=checkpoint), published]


def _origin(command: UpdatePolicy) -> _Origin:
    return _Origin(job=command.job, epoch=command.epoch, step=command.step, attempt=command.attempt)
