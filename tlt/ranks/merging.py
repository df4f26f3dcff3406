"""From a trunk and what members added to it: the next trunk, and how good the drafter in it is."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tlt.blobs import Blobs
from tlt.errors import BlobError
from tlt.learn.drafter.acceptance import Rollout, accept_lengths
from tlt.learn.drafter.merging import Delta, Trunk, merge
from tlt.learn.drafter.sample import PolicyEnds
from tlt.looks import Look
from tlt.messages import BlobRef, Canary, DrafterRef, DrafterTrained, MergeDrafter, TrunkRef
from tlt.models.drafter import Drafter, DrafterConfig, new_drafter
from tlt.models.weights import read_weights
from tlt.policies.drafting import CANARY_DEPTH
from tlt.ranks.frames import Load
from tlt.ranks.lessons import Text, rollout
from tlt.ranks.pool import Answer

_WEIGHTS, _MEAN = "weights.", "mean."


def read_trunk(
    blobs: Blobs, ref: TrunkRef, root: Trunk | None, device: torch.device, look: Look
) -> Trunk:
    """`root`: where this member's training began, if no blob holds that."""
    if ref.weights is None:
        if root is None:
            raise BlobError("a trunk that nobody has begun")
        return root
    read = _read(blobs, ref.weights, device, look)
    if not any(name.startswith(_WEIGHTS) for name in read):
        # it begins with a drafter that was in use
        own = {name: tensor for name, tensor in read.items() if name != "d2t"}
        read = {part + name: t for name, t in own.items() for part in (_WEIGHTS, _MEAN)}
    return Trunk(tensors=read, updates=ref.updates, lessons=ref.lessons)


def next_trunk(
    blobs: Blobs, command: MergeDrafter, root: Trunk | None, device: torch.device, look: Look
) -> Trunk:
    trunk = read_trunk(blobs, command.trunk, root, device, look)
    deltas: list[Delta] = []
    for ref in command.deltas:
        tensors = _read(blobs, ref.blob, device, look)
        deltas.append(Delta(tensors=tensors, lessons=ref.lessons, known=ref.known))
    return merge(trunk, deltas, look)


def _read(blobs: Blobs, ref: BlobRef, device: torch.device, look: Look) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in read_weights(blobs, ref, look).items()}


def mean_of(trunk: Trunk) -> dict[str, Tensor]:
    tensors = trunk.tensors.items()
    return {n.removeprefix(_MEAN): tensor for n, tensor in tensors if n.startswith(_MEAN)}


def drafter_of(
    tensors: Mapping[str, Tensor], config: DrafterConfig, ends: PolicyEnds, named: Drafter | None
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
    ends: PolicyEnds,
    answers: Sequence[Answer],
    budget: int,
    look: Look,
) -> Canary:
    """On no answers it says nothing, which nobody goes by; `budget`: rows at once."""
    if not answers:
        return Canary(used=None, trained=1.0, answers=0)
    rollouts = [_rollout(answer, len(ends.head)) for answer in answers]

    def length(drafter: Drafter) -> float:
        found = accept_lengths(drafter, ends, rollouts, (CANARY_DEPTH,), budget, look)
        return max(found.noise[CANARY_DEPTH], found.plain[CANARY_DEPTH])

    return Canary(
        used=None if used is None else length(used),
        trained=length(trained),
        answers=len(answers),
    )


def report(
    load: Load,
    command: MergeDrafter,
    trunk: Trunk,
    blob: BlobRef,
    drafter: DrafterRef,
    canary: Canary,
    seconds: float,
) -> DrafterTrained:
    return DrafterTrained(
        job=load.job,
        worker=load.worker,
        incarnation=load.incarnation,
        trunk=TrunkRef(
            version=command.version,
            root=command.trunk.root,
            weights=blob,
            updates=trunk.updates,
            lessons=trunk.lessons,
            merged={
                **command.trunk.merged,
                **{ref.member: (ref.number, trunk.lessons) for ref in command.deltas},
            },
        ),
        drafter=drafter,
        canary=canary,
        seconds=seconds,
    )


def _rollout(answer: Answer, vocabulary: int) -> Rollout:
    assert answer.states is not None
    text = Text(id=0, tokens=answer.tokens, prompt=answer.prompt)
    return rollout(text, answer.states, answer.key, vocabulary)
