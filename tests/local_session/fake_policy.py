"""A policy whose weights are a digest of all that it has learned, what it answers, and its trainer.

A lost, doubled or misplaced update changes the digest, and with it every later answer.
"""

import hashlib
from pathlib import Path
from random import Random

import msgspec

from tests.local_session.fake_collective import Collective
from tlt.base.id_types import PolicyVersion, Step
from tlt.blobs.answer_files import AnswerFiles
from tlt.blobs.blob_files import Blobs
from tlt.models.safetensors_header import Shape, read_folder_shapes
from tlt.policies.algorithm.learning_rate import learning_rate
from tlt.protocol.commands import OpenJob, PromptIssued, UpdatePolicy
from tlt.protocol.events import (
    CheckpointCommitted,
    PolicyPublished,
    PolicyUpdateFinished,
)
from tlt.protocol.refs import BlobRef, Checkpoint, MinibatchShare, PolicyRef
from tlt.protocol.shared_values import UpdateMetrics
from tlt.spec.config import JobSpec

# of the policy that the spec names
INITIAL = "0" * 32
_LEAST_TOKENS = 4
_DIGITS = 16**8
_METADATA, _DIGEST = "__metadata__", "weights"
UpdateEvent = CheckpointCommitted | PolicyPublished | PolicyUpdateFinished


class Optimiser(msgspec.Struct, frozen=True, omit_defaults=True):
    """Name the weights that an optimiser belongs to; ranks that split one copy have a shard."""

    of_weights: str
    shard: int = 0


def answer_limit(spec: JobSpec, prompt: PromptIssued) -> int:
    own = None if prompt.set is None else spec.data.evaluation_sets.get(prompt.set)
    return (own and own.max_new_tokens) or spec.rollout.max_new_tokens


def write_answer(spec: JobSpec, prompt: PromptIssued, weights: str) -> list[int]:
    """Return the tokens of an answer, the same for the same noise and weights."""
    step = prompt.step if prompt.purpose == "train" else Step(0)
    noise = Random(repr((spec.seed, step, prompt.purpose, prompt.prompt, prompt.member, weights)))
    most = answer_limit(spec, prompt)
    return [noise.randint(0, 1) for _ in range(noise.randint(min(_LEAST_TOKENS, most), most))]


def pack_weights(weights: str, shapes: dict[str, Shape]) -> bytes:
    """Return a safetensors file of the policy's shapes whose only content is the digest."""
    entries = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": (0, 0)}
        for name, shape in shapes.items()
    }
    header = msgspec.json.encode({_METADATA: {_DIGEST: weights}, **entries})
    return len(header).to_bytes(8, "little") + header


def read_weights(blobs: Blobs, ref: BlobRef) -> str:
    return msgspec.json.decode(blobs.get(ref)[8:])[_METADATA][_DIGEST]


class FakeTrainer:
    """A rank's trainer; all ranks of an update have to hold the same weights before it."""

    def __init__(self, opened: OpenJob, blobs: Blobs, rank: int) -> None:
        self.weights = INITIAL
        # fresh ranks hold the policy that the spec names
        self.version = PolicyVersion(0)
        self._spec = opened.spec
        self._rank = rank
        self._blobs = blobs
        self._answers = AnswerFiles(Path(opened.folder))
        # which shards this rank holds is decided with the first update
        self._holds_shard = False

    @property
    def is_sharded(self) -> bool:
        return self._spec.algorithm.shards != 1

    def update(self, command: UpdatePolicy) -> list[UpdateEvent]:
        group = Collective(
            command.rendezvous,
            command.group,
            command.first_rank + self._rank,
            command.world,
            self._spec.algorithm.collective_timeout_seconds,
        )
        self._prepare(command, group)
        own = [self._describe(command, share) for share in command.minibatches]
        tokens = self._learn(command, group, own)
        published = self._publish(command, group, tokens)
        finished = PolicyUpdateFinished(
            job=command.job,
            epoch=command.epoch,
            step=command.step,
            attempt=command.attempt,
            worker=command.worker,
            incarnation=command.incarnation,
            version=self.version,
        )
        return [*published, finished]

    def _prepare(self, command: UpdatePolicy, group: Collective) -> None:
        """Bring all ranks to the version that the update starts from, or fail."""
        if command.reload:
            self.weights, self.version, self._holds_shard = INITIAL, PolicyVersion(0), True
        if self.is_sharded and not self._holds_shard:
            raise AssertionError("this rank has loaded no shard")
        if command.restore is not None:
            self._restore(command.restore)
        held = group.gather(msgspec.json.encode((self.version, self.weights)))
        if command.sync_from is not None:
            held = [held[command.sync_from]]
            self.version, self.weights = msgspec.json.decode(
                held[0], type=tuple[PolicyVersion, str]
            )
        if len(set(held)) > 1 or self.version != command.version:
            raise AssertionError(f"the update from {command.version} finds {held}")

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.weights = read_weights(self._blobs, checkpoint.weights)
        self.version = checkpoint.version
        shards = checkpoint.optimiser_shards.values()
        for ref in shards if checkpoint.optimiser is None else [checkpoint.optimiser]:
            optimiser = msgspec.json.decode(self._blobs.get(ref), type=Optimiser)
            if optimiser.of_weights != self.weights:
                raise AssertionError("the optimiser belongs to other weights")

    def _describe(self, command: UpdatePolicy, share: MinibatchShare) -> list[str]:
        """Return what this rank learns from in a minibatch, in words."""
        described: list[str] = []
        for ref in share.ranks[self._rank]:
            answer = self._answers.read(ref.answer)
            drawn = all(span.version == command.version for span in answer.policies)
            values = (ref.prompt, ref.member, f"{ref.advantage:.9f}", answer.tokens, drawn)
            described.append(repr(values))
        return described

    def _learn(self, command: UpdatePolicy, group: Collective, own: list[list[str]]) -> int:
        parts = [
            msgspec.json.decode(part, type=list[list[str]])
            for part in group.gather(msgspec.json.encode(own))
        ]
        rate = learning_rate(self._spec.algorithm, command.version)
        for minibatch in zip(*parts, strict=True):
            samples = sorted(sample for part in minibatch for sample in part)
            if len(set(samples)) < len(samples):
                raise AssertionError("an answer is learned from twice")
            if samples:
                learned = repr((self.weights, rate, samples)).encode()
                self.weights = hashlib.blake2b(learned, digest_size=16).hexdigest()
        self.version = PolicyVersion(command.version + 1)
        return sum(share.total_tokens for share in command.minibatches)

    def _publish(self, command: UpdatePolicy, group: Collective, tokens: int) -> list[UpdateEvent]:
        shards: dict[str, BlobRef] = {}
        if command.checkpoint and self.is_sharded:
            own = {f"__{group.rank}_0.distcp": self._put_optimiser(group.rank)}
            for part in group.gather(msgspec.json.encode(own)):
                shards |= msgspec.json.decode(part, type=dict[str, BlobRef])
        if group.rank > 0:
            return []
        data = pack_weights(self.weights, read_folder_shapes(Path(self._spec.policy.path)))
        weights = self._blobs.put(data, commit=command.checkpoint)
        published = PolicyPublished(
            job=command.job,
            epoch=command.epoch,
            step=command.step,
            attempt=command.attempt,
            policy=PolicyRef(version=self.version, weights=weights),
            metrics=self._metrics(command, tokens),
        )
        if not command.checkpoint:
            return [published]
        checkpoint = Checkpoint(
            version=self.version,
            weights=weights,
            optimiser=None if self.is_sharded else self._put_optimiser(0),
            optimiser_shards=shards,
        )
        committed = CheckpointCommitted(
            job=command.job,
            epoch=command.epoch,
            step=command.step,
            attempt=command.attempt,
            checkpoint=checkpoint,
        )
        return [committed, published]

    def _put_optimiser(self, shard: int) -> BlobRef:
        ref = self._blobs.put(msgspec.json.encode(Optimiser(self.weights, shard)), commit=True)
        self._blobs.release(ref)
        return ref

    def _metrics(self, command: UpdatePolicy, tokens: int) -> UpdateMetrics:
        noise = int(self.weights[:8], 16) / _DIGITS
        return UpdateMetrics(
            loss=noise,
            gradient_norm=1 + noise,
            learning_rate=learning_rate(self._spec.algorithm, command.version),
            entropy=0.5,
            clipped_low=0.0,
            clipped_high=0.0,
            sampling_kl=0.0,
            reference_kl=None,
            importance_truncated=0.0,
            tokens=tokens,
            samples=sum(share.total_sequences for share in command.minibatches),
            optimiser_steps=len(command.minibatches),
        )
