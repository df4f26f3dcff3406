"""A policy whose ranks each hold a part of every weight, gradient and moment (FSDP2).

`fully_shard` gathers a layer's weights before the layer runs and frees them afterwards, so all
ranks run the same number of passes: `micro_batches` adds fillers, which teach nothing.
"""

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tlt.errors import ConfigError
from tlt.spec.config import AlgorithmSpec
from tlt.trainer.collectives import reduce_max, translate_errors
from tlt.trainer.named_tensors import copy_named
from tlt.trainer.policy.model.logprobs import score_batch
from tlt.trainer.policy.model.micro_batches import MicroBatch, PolicySample, make_filler
from tlt.trainer.policy.model.model_loading import outline_model, require_plain_logits
from tlt.trainer.policy.policy_models import PolicyModels, checkpoint_layers_if_due
from tlt.trainer.policy.speed.attention_choice import (
    NEEDS_BFLOAT16,
    AttentionKind,
    apply_attention,
    log_choice,
    packing_misfit,
    refusal,
    require_flash,
)
from tlt.trainer.policy.speed.layer_probe import decoder_layers
from tlt.trainer.policy.speed.precision_choice import device_has_bfloat16

T = TypeVar("T")


class ShardedModel(nn.Module):
    """The root that FSDP2 gathers: embedding, norm and head stay whole for the whole pass."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, compute: Callable[[PreTrainedModel], T]) -> T:
        return compute(self.policy)

    def run(self, compute: Callable[[PreTrainedModel], T]) -> T:
        """Compute with whole weights; without a backward pass the root is freed at once.

        Otherwise the next pass would use the root's weights from before the optimiser's step.
        """
        result = self(compute)
        if not torch.is_grad_enabled():
            cast("FSDPModule", self).reshard()
        return result


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedPolicyModels(PolicyModels):
    root: ShardedModel
    reference_root: ShardedModel | None
    group: ProcessGroup

    def micro_batches(self, samples: Sequence[PolicySample]) -> list[MicroBatch]:
        """Build as many micro-batches as the rank that has the most."""
        own = super().micro_batches(samples)
        count = torch.tensor(len(own), device=self.device)
        reduce_max(count, self.group)
        missing = int(count.item()) - len(own)
        return own + [make_filler(self.device) for _ in range(missing)]

    def score(self, batch: MicroBatch, number: int) -> tuple[Tensor, Tensor]:
        def compute(policy: PreTrainedModel) -> tuple[Tensor, Tensor]:
            learned = self.spec.entropy_coefficient > 0
            logprobs, entropy = score_batch(policy, batch, self.bfloat16, learned)
            # FSDP2 warns of views
            return logprobs.clone(), entropy

        with translate_errors("a pass over shards"):
            return self.root.run(compute)

    def score_reference(self, batch: MicroBatch) -> Tensor | None:
        if self.reference_root is None:
            return None
        with torch.no_grad(), translate_errors("a pass over the reference's shards"):
            return self.reference_root.run(
                lambda policy: score_batch(policy, batch, self.bfloat16)
            )[0]


class ShardedGradients:
    """The gradients of shards: FSDP2 sums them up over the ranks while it computes them."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters

    def zero(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def reduce(self, group: ProcessGroup | None) -> None:
        """Do nothing: the backward pass has reduced them."""

    def clip(self, limit: float) -> float:
        """Scale the norm over all shards down to at most `limit`, and return it from before."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        with translate_errors("a norm over shards"):
            total = cast("DTensor", torch.nn.utils.get_total_norm(gradients))
            norm = total.full_tensor().item()
        if norm > limit:
            for gradient in gradients:
                gradient.mul_(limit / norm)
        return norm


@contextmanager
def sharded_gradients(parameters: Sequence[Tensor]) -> Generator[ShardedGradients]:
    gradients = ShardedGradients(parameters)
    try:
        yield gradients
    finally:
        gradients.zero()


def load_sharded_policy_models(
    model_dir: str,
    spec: AlgorithmSpec,
    group: ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
) -> ShardedPolicyModels:
    if spec.attention == "native":
        raise ConfigError("algorithm.attention: native does not work with shards")
    bfloat16 = spec.precision == "bfloat16" or (
        # a measurement would need the whole model
        spec.precision == "auto" and device.type == "cuda" and device_has_bfloat16(device)
    )
    timeout = timedelta(seconds=spec.collective_timeout_seconds)
    mesh = learner_mesh(group, spec.shards, device, timeout)
    root = load_sharded_model(model_dir, mesh, device, bfloat16, dtype)
    packed = _set_attention(root, spec, bfloat16)
    checkpoint_layers_if_due(root.policy, spec)
    reference: ShardedModel | None = None
    if spec.kl_coefficient > 0:
        reference = load_sharded_model(model_dir, mesh, device, bfloat16, dtype)
        reference.requires_grad_(False)
        _set_attention(reference, spec, bfloat16)
    return ShardedPolicyModels(
        policy=root.policy,
        reference=None if reference is None else reference.policy,
        spec=spec,
        bfloat16=bfloat16,
        packed=packed,
        root=root,
        reference_root=reference,
        group=group,
    )


def _set_attention(root: ShardedModel, spec: AlgorithmSpec, bfloat16: bool) -> bool:
    """Choose without measuring, and return True if micro-batches are packed."""
    device, kind = root.policy.device, spec.attention
    if kind == "auto":
        kind = "flash" if device.type == "cuda" else "padded"
    elif kind == "flash":
        require_flash(device, bfloat16)
    if kind == "padded":
        return False
    misfit = _misfit(root, kind, bfloat16)
    if misfit is None:
        apply_attention(root.policy, kind)
        return True
    if spec.attention != "auto":
        raise refusal(root.policy, kind, misfit)
    log_choice("padded", {kind: misfit})
    return False


def _misfit(root: ShardedModel, kind: AttentionKind, bfloat16: bool) -> str | None:
    if kind == "flash" and not bfloat16:
        return NEEDS_BFLOAT16
    with torch.no_grad():
        return root.run(lambda policy: packing_misfit(policy, kind, bfloat16))


# meshes that this process has made
_MESHES = itertools.count()


def count_shards(wanted: int | Literal["all"], ranks: int) -> int:
    """Return over how many ranks one copy is split: at least as many as wanted, if there are.

    The number has to divide the ranks, of which some may be lost.
    """
    if wanted == "all":
        return ranks
    return next((shards for shards in range(wanted, ranks) if ranks % shards == 0), ranks)


def learner_mesh(
    group: ProcessGroup, wanted: int | Literal["all"], device: torch.device, timeout: timedelta
) -> DeviceMesh:
    """Return a mesh that splits the weights over so many ranks; the rest are replicas (HSDP).

    Its names are new: meshes of the same ranks and names are equal, and DTensor would reuse what it
    has derived from an earlier one, in which this process may have had another rank.
    """
    world, formed = group.size(), next(_MESHES)
    shards = count_shards(wanted, world)
    names = (f"replicas{formed}", f"shards{formed}")
    if shards == world:
        return DeviceMesh.from_group(group, device.type, mesh_dim_names=names[1:])
    mesh = init_device_mesh(device.type, (world // shards, shards), mesh_dim_names=names)
    # a new group has its backend's deadline, of ten or thirty minutes
    for name in names:
        distributed_c10d._set_pg_timeout(timeout, mesh.get_group(name))  # pyright: ignore
    return mesh


def load_sharded_model(
    model_dir: str, mesh: DeviceMesh, device: torch.device, bfloat16: bool, dtype: torch.dtype
) -> ShardedModel:
    """Load only this rank's part of each weight, and compute the layers in bfloat16 if wanted."""
    policy = outline_model(model_dir, dtype)
    root = ShardedModel(policy)
    compute = torch.bfloat16 if bfloat16 else None
    for layer in decoder_layers(policy):
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(compute, dtype))
    fully_shard(root, mesh=mesh)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # the loss is divided by totals over all ranks: gradients are summed, not averaged
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    root.to_empty(device=device)
    policy.tie_weights()
    for module in policy.modules():
        # tables that no file holds; the weights that this would initialise are loaded below
        if not list(module.parameters(recurse=False)):
            policy._init_weights(module)  # pyright: ignore[reportPrivateUsage]
    copy_into_shards(dict(policy.named_parameters()), StoredWeights(Path(model_dir)), "folder")
    with torch.no_grad():
        root.run(lambda model: require_plain_logits(model, model_dir))
    return root


class StoredWeights(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors files, mapped one at a time."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened = safe_open(file, framework="pt")
            self._files |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Generator[str]:
        yield from self._files

    def __len__(self) -> int:
        return len(self._files)


def copy_into_shards(shards: Mapping[str, Tensor], whole: Mapping[str, Tensor], what: str) -> None:
    """Copy this rank's part of each tensor, reading them one at a time."""
    for name, shard in shards.items():
        if name not in whole:
            raise ConfigError(f"the {what} lacks {name}")
        copy_named({name: shard}, {name: whole[name]}, what)
