"""From a trunk and what members added to it: the next trunk, and how good the drafter in it is."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tlt.blobs import Blobs
from tlt.errors import BlobError
from tlt.interrupt import CheckInterrupt
from tlt.models.eagle_drafter import Drafter, DrafterConfig, new_drafter
from tlt.models.safetensors_io import read_weights
from tlt.policies.drafter.payoff_evidence import EVALUATION_DEPTH
from tlt.protocol.commands import MergeDrafter
from tlt.protocol.events import DrafterMerged
from tlt.protocol.records import DrafterEvaluation
from tlt.protocol.refs import BlobRef, DrafterBase, DrafterRef
from tlt.ranks.drafter_samples import Text, rollout
from tlt.ranks.rank_job import RankJob
from tlt.ranks.replay_buffer import Answer
from tlt.trainer.drafter.accept_length import PolicyRollout, accept_lengths
from tlt.trainer.drafter.delta_merging import BaseWeights, Delta, merge_deltas
from tlt.trainer.drafter.samples import EmbeddingAndHead

_WEIGHTS, _MEAN = "weights.", "mean."


def read_trunk(
    blobs: Blobs,
    ref: DrafterBase,
    root: BaseWeights | None,
    device: torch.device,
    check: CheckInterrupt,
) -> BaseWeights:
    """`root`: where this member's training began, if no blob holds that."""
    if ref.weights is None:
        if root is None:
            raise BlobError("a trunk that nobody has begun")
        return root
    read = _read(blobs, ref.weights, device, check)
    if not any(name.startswith(_WEIGHTS) for name in read):
        # it begins with a drafter that was in use
        own = {name: tensor for name, tensor in read.items() if name != "d2t"}
        read = {part + name: t for name, t in own.items() for part in (_WEIGHTS, _MEAN)}
    return BaseWeights(tensors=read, updates=ref.updates, micro_batches=ref.micro_batches)


def next_trunk(
    blobs: Blobs,
    command: MergeDrafter,
    root: BaseWeights | None,
    device: torch.device,
    check: CheckInterrupt,
) -> BaseWeights:
    base = read_trunk(blobs, command.base, root, device, check)
    deltas: list[Delta] = []
    for ref in command.deltas:
        tensors = _read(blobs, ref.blob, device, check)
        deltas.append(Delta(tensors=tensors, micro_batches=ref.micro_batches, known=ref.known))
    return merge_deltas(base, deltas, check)


def _read(
    blobs: Blobs, ref: BlobRef, device: torch.device, check: CheckInterrupt
) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in read_weights(blobs, ref, check).items()}


def mean_of(base: BaseWeights) -> dict[str, Tensor]:
    tensors = base.tensors.items()
    return {n.removeprefix(_MEAN): tensor for n, tensor in tensors if n.startswith(_MEAN)}


def drafter_of(
    tensors: Mapping[str, Tensor],
    config: DrafterConfig,
    ends: EmbeddingAndHead,
    named: Drafter | None,
) -> Drafter:
    """What is not trained of it is that of the drafter which the job names."""
    drafter = new_drafter(config)
    if named is not None:
        drafter.load_state_dict(named.state_dict())
    wanted = {name: parameter.shape for name, parameter in drafter.named_parameters()}
    own = {name: tensor for name, tensor in tensors.items() if name != "d2t"}
    if {name: tensor.shape for name, tensor in own.items()} != wanted:
        raise BlobError("a drafter of other names or shapes than this job's")
    if not all(tensor.isfinite().all() for tensor in own.values()):
        raise BlobError("a drafter with numbers that are not finite")
    drafter.load_state_dict(own, strict=False)
    return drafter.to(ends.head).requires_grad_(False)


def measured(
    trained: Drafter,
    used: Drafter | None,
    ends: EmbeddingAndHead,
    answers: Sequence[Answer],
    budget: int,
    check: CheckInterrupt,
) -> DrafterEvaluation:
    """On no answers it says nothing, which nobody goes by; `budget`: rows at once."""
    if not answers:
        return DrafterEvaluation(used=None, trained=1.0, answers=0)
    rollouts = [_rollout(answer, len(ends.head)) for answer in answers]

    def length(drafter: Drafter) -> float:
        found = accept_lengths(drafter, ends, rollouts, (EVALUATION_DEPTH,), budget, check)
        return max(found.noise[EVALUATION_DEPTH], found.plain[EVALUATION_DEPTH])

    return DrafterEvaluation(
        used=None if used is None else length(used),
        trained=length(trained),
        answers=len(answers),
    )


def report(
    job: RankJob,
    command: MergeDrafter,
    base: BaseWeights,
    blob: BlobRef,
    drafter: DrafterRef,
    evaluation: DrafterEvaluation,
    seconds: float,
) -> DrafterMerged:
    return DrafterMerged(
        **job.reporter,
        base=DrafterBase(
            version=command.version,
            root=command.base.root,
            weights=blob,
            updates=base.updates,
            micro_batches=base.micro_batches,
            merged={
                **command.base.merged,
                **{ref.member: (ref.number, base.micro_batches) for ref in command.deltas},
            },
        ),
        drafter=drafter,
        evaluation=evaluation,
        seconds=seconds,
    )


def _rollout(answer: Answer, vocabulary: int) -> PolicyRollout:
    assert answer.states is not None
    text = Text(id=0, tokens=answer.tokens, prompt=answer.prompt)
    return rollout(text, answer.states, answer.key, vocabulary)
