"""A rank's part of an update: every rank of the job computes one, all end with equal weights."""

import time
from contextlib import ExitStack

import torch
from torch.distributed import ProcessGroup

from tlt.blobs import Blobs
from tlt.ids import PolicyVersion
from tlt.models.safetensors_io import put_weights, read_weights
from tlt.protocol.events import RolloutFinished
from tlt.protocol.refs import Checkpoint, MinibatchShare, PolicyRef
from tlt.ranks.worker_channel import Load, Progress, Train, Trained
from tlt.trainer import process_group as groups
from tlt.trainer.policy.policy_learner import PolicyLearner
from tlt.trainer.policy.samples import Minibatch, PolicySample


class PolicyUpdateDuty:
    def __init__(self, load: Load, device: torch.device, blobs: Blobs, progress: Progress) -> None:
        spec = load.spec
        self._timeout = spec.algorithm.collective_timeout_seconds
        self._device = device
        self._blobs = blobs
        self._progress = progress
        # reads the model, builds kernels, measures
        with progress.made():
            self.learner = PolicyLearner(
                spec.policy.path, spec.algorithm, spec.policy.max_context, device, progress.made
            )

    def train(self, frame: Train) -> Trained:
        began = time.monotonic()
        learn = frame.learn
        rank = learn.first_rank + frame.local_rank
        version = PolicyVersion(learn.version + 1)
        with ExitStack() as stack:
            # Whoever is there first waits while the others bring up their trainers.
            with self._progress.made():
                group = self._join(stack, frame, rank)
            if learn.restore is not None:
                self._restore(learn.restore)
            if learn.sync_from is not None and group is not None:
                self.learner.broadcast(learn.sync_from, group)
            minibatches = [
                self._minibatch(share, frame.local_rank, samples)
                for share, samples in zip(learn.minibatches, frame.samples, strict=True)
            ]
            metrics = self.learner.update(
                learn.version, minibatches, group, lambda: self._progress.report(0)
            )
        checkpoint, policy = None, None
        if rank == 0:
            checkpoint = self._checkpoint(version) if learn.checkpoint else None
            policy = self._publish(version, checkpoint)
        return Trained(
            learn=learn,
            version=version,
            seconds=time.monotonic() - began,
            policy=policy,
            metrics=metrics if rank == 0 else None,
            checkpoint=checkpoint,
        )

    def _join(self, stack: ExitStack, frame: Train, rank: int) -> ProcessGroup | None:
        learn = frame.learn
        if learn.world == 1:
            return None
        stack.callback(groups.leave_group)
        return groups.join_group(
            learn.rendezvous, learn.group, rank, learn.world, self._timeout, self._device
        )

    def _minibatch(
        self, share: MinibatchShare, local_rank: int, rollouts: tuple[RolloutFinished, ...]
    ) -> Minibatch:
        return Minibatch(
            samples=[
                self._sample(rollout, ref.advantage)
                for ref, rollout in zip(share.ranks[local_rank], rollouts, strict=True)
            ],
            total_tokens=share.total_tokens,
            total_sequences=share.total_sequences,
        )

    def _sample(self, rollout: RolloutFinished, advantage: float) -> PolicySample:
        return PolicySample(
            prompt=rollout.prompt_tokens,
            completion=tuple(self._blobs.unpack(rollout.tokens).tolist()),
            logprobs=tuple(self._blobs.unpack(rollout.logprobs).tolist()),
            temperature=rollout.temperature,
            advantage=advantage,
        )

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.learner.load_weights(read_weights(self._blobs, checkpoint.weights))
        optimiser = read_weights(self._blobs, checkpoint.optimiser)
        self.learner.load_optimiser_state(optimiser)

    def _publish(self, version: PolicyVersion, saved: Checkpoint | None) -> PolicyRef:
        if saved is not None:
            return PolicyRef(version=version, weights=saved.weights)
        weights = put_weights(self._blobs, self.learner.weights(), commit=False)
        return PolicyRef(version=version, weights=weights)

    def _checkpoint(self, version: PolicyVersion) -> Checkpoint:
        return Checkpoint(
            version=version,
            weights=put_weights(self._blobs, self.learner.weights(), commit=True),
            optimiser=put_weights(self._blobs, self.learner.optimiser_state(), commit=True),
        )
