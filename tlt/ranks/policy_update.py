"""Compute a rank's part of a policy update; afterwards all ranks of the job hold equal weights.

Where the ranks split one copy, their group stays for the next update; otherwise each update forms a
group of its own.
"""

import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypedDict

import msgspec
from torch.distributed import ProcessGroup

from tlt.id_types import Attempt, Epoch, JobId, PolicyVersion, Step
from tlt.models.safetensors_io import put_weights, read_weights, stream_weights
from tlt.protocol.commands import UpdatePolicy
from tlt.protocol.events import (
    CheckpointCommitted,
    PolicyPublished,
    PolicyUpdateFinished,
    RolloutFinished,
)
from tlt.protocol.refs import BlobRef, Checkpoint, MinibatchShare, PolicyRef
from tlt.protocol.shared_values import UpdateMetrics
from tlt.ranks.rank_job_context import RankJob
from tlt.ranks.worker_channel import Progress
from tlt.trainer import process_group as groups
from tlt.trainer.collectives import gather_bytes
from tlt.trainer.policy.adamw import METADATA
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
        spec = self._job.spec
        parts = {} if group is None else {"group": group}
        # reading the model, building kernels and measuring take long
        with self._progress.report_meanwhile():
            return PolicyLearner(
                spec.policy.path,
                spec.algorithm,
                spec.policy.max_context,
                self._job.device,
                self._progress.report_meanwhile,
                **parts,
            )

    def run(
        self, command: UpdatePolicy, minibatches: tuple[tuple[RolloutFinished, ...], ...]
    ) -> list[UpdateEvent]:
        """Make one update; the first rank of all publishes the weights."""
        began = time.monotonic()
        rank = command.first_rank + self._job.setup.rank
        with ExitStack() as stack:
            group = self._prepare(stack, command, rank)
            samples = [
                self._minibatch(share, rollouts)
                for share, rollouts in zip(command.minibatches, minibatches, strict=True)
            ]
            metrics = self.learner.update(
                command.version, samples, group, lambda: self._progress.report(0)
            )
            published = self._publish(command, metrics, rank, group)
        finished = PolicyUpdateFinished(
            **_origin(command),
            worker=command.worker,
            incarnation=command.incarnation,
            version=PolicyVersion(command.version + 1),
            seconds=time.monotonic() - began,
        )
        return [*published, finished]

    def _prepare(self, stack: ExitStack, command: UpdatePolicy, rank: int) -> ProcessGroup | None:
        """Bring all ranks to the version that the update starts from."""
        if self._sharded:
            if command.reload:
                self._group, self._learner = self._join(command, rank), None
                self._learner = self._load(self._group)
            group = self._group
        else:
            stack.callback(groups.leave_group)
            group = self._join(command, rank)
        if command.restore is not None:
            self._restore(command.restore)
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
        with self._progress.report_meanwhile():
            self.learner.load_weights(read_weights(self._blobs, checkpoint.weights))
            if checkpoint.optimiser is not None:
                self.learner.load_optimiser_state(read_weights(self._blobs, checkpoint.optimiser))
            else:
                with self._optimiser_folder(checkpoint) as folder:
                    self.learner.load_optimiser(folder)

    def _publish(
        self,
        command: UpdatePolicy,
        metrics: UpdateMetrics,
        rank: int,
        group: ProcessGroup | None,
    ) -> list[UpdateEvent]:
        """Publish the weights, and save a checkpoint if that is due; the first rank reports it."""
        version, commit = PolicyVersion(command.version + 1), command.checkpoint
        with self._progress.report_meanwhile():
            weights = self._put_weights(commit, rank)
            optimiser, shards = self._put_optimiser(command, rank, group) if commit else (None, {})
        if weights is None:
            return []
        policy = PolicyRef(version=version, weights=weights)
        published = PolicyPublished(**_origin(command), policy=policy, metrics=metrics)
        if not commit:
            return [published]
        checkpoint = Checkpoint(
            version=version, weights=weights, optimiser=optimiser, optimiser_shards=shards
        )
        return [CheckpointCommitted(**_origin(command), checkpoint=checkpoint), published]

    def _put_weights(self, commit: bool, rank: int) -> BlobRef | None:
        """Store the weights; only the first rank does, with the help of all that hold shards."""
        if rank == 0 and not self._sharded:
            return put_weights(self._blobs, self.learner.weights(), commit=commit)
        if rank == 0:
            shapes = {name: tensor.shape for name, tensor in self.learner.weights().items()}
            return self._blobs.put_file(
                lambda file: stream_weights(file, shapes, self.learner.whole_weights()),
                commit=commit,
            )
        if self._sharded:
            for _ in self.learner.whole_weights():
                pass
        return None

    def _put_optimiser(
        self, command: UpdatePolicy, rank: int, group: ProcessGroup | None
    ) -> tuple[BlobRef | None, dict[str, BlobRef]]:
        if group is None or not self._sharded:
            if rank > 0:
                return None, {}
            return put_weights(self._blobs, self.learner.optimiser_state(), commit=True), {}
        folder = self._job.checkpoint_folder(f"{command.epoch}.{command.attempt}.{command.version}")
        folder.mkdir(parents=True, exist_ok=True)
        self.learner.save_optimiser(folder)
        # each rank stores what it has written; the first one the description, too
        own = [*folder.glob(f"__{rank}_*"), *([folder / METADATA] if rank == 0 else [])]
        stored = {file.name: self._blobs.put_file(file.replace, commit=True) for file in own}
        parts = gather_bytes(msgspec.json.encode(stored), group, self._job.device)
        if rank == 0:
            folder.rmdir()
        refs: dict[str, BlobRef] = {}
        for part in parts:
            refs |= msgspec.json.decode(part, type=dict[str, BlobRef])
        return None, refs

    @contextmanager
    def _optimiser_folder(self, checkpoint: Checkpoint) -> Generator[Path]:
        """Give the files of a checkpoint their names; each rank verifies some of them."""
        world, rank = (1, 0) if self._group is None else (self._group.size(), self._group.rank())
        with tempfile.TemporaryDirectory(dir=self._job.flight) as name:
            for index, (file, ref) in enumerate(sorted(checkpoint.optimiser_shards.items())):
                mine = index % world == rank
                stored = self._blobs.verify(ref) if mine else self._blobs.path(ref)
                (Path(name) / file).symlink_to(stored.resolve())
            yield Path(name)


def _origin(command: UpdatePolicy) -> _Origin:
    return _Origin(job=command.job, epoch=command.epoch, step=command.step, attempt=command.attempt)
