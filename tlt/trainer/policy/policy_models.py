"""The policy, its frozen reference, and how both are computed."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import PreTrainedModel

from tlt.policies.algorithm.activation_checkpointing import checkpoints_activations
from tlt.spec.config import AlgorithmSpec
from tlt.trainer.policy.model.logprobs import score_batch
from tlt.trainer.policy.model.micro_batches import MicroBatch, PolicySample, build_micro_batches
from tlt.trainer.policy.model.model_loading import context_limit, load_model
from tlt.trainer.policy.model.trained_part import TrainedPart, freeze_weights
from tlt.trainer.policy.speed.attention_choice import set_attention
from tlt.trainer.policy.speed.layer_probe import decoder_layers
from tlt.trainer.policy.speed.precision_choice import choose_bfloat16

if TYPE_CHECKING:
    from tlt.trainer.policy.model.lora_adapter import LoraAdapter


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyModels:
    policy: PreTrainedModel
    # None: there is none, or it is the policy without its adapter
    reference: PreTrainedModel | None
    spec: AlgorithmSpec
    bfloat16: bool
    packed: bool
    adapter: "LoraAdapter | None" = None

    @property
    def device(self) -> torch.device:
        return self.policy.device

    @property
    def has_reference(self) -> bool:
        return self.spec.kl_coefficient > 0

    def trained(self) -> dict[str, Tensor]:
        """Return what an update changes."""
        if self.adapter is not None:
            return self.adapter.parameters
        # a tied head appears once, under its first name
        return {name: p for name, p in self.policy.named_parameters() if p.requires_grad}

    def dropout(self, step: int, rank: int) -> AbstractContextManager[None]:
        return nullcontext() if self.adapter is None else self.adapter.dropout(step, rank)

    def micro_batches(self, samples: Sequence[PolicySample]) -> list[MicroBatch]:
        tokens = self.spec.chosen_microbatch_tokens
        return build_micro_batches(samples, tokens, self.device, self.packed)

    def score(self, batch: MicroBatch, number: int) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy of each completion token.

        An adapter drops the same inputs in all passes over the micro-batch of this number.
        """
        if self.adapter is not None:
            self.adapter.seed_dropout(number)
        return score_batch(self.policy, batch, self.bfloat16, self.spec.entropy_coefficient > 0)

    def score_reference(self, batch: MicroBatch) -> Tensor | None:
        """Return the frozen reference's log-probs, if there is one."""
        if not self.has_reference:
            return None
        without_adapter = nullcontext() if self.adapter is None else self.adapter.disabled()
        model = self.policy if self.reference is None else self.reference
        with torch.no_grad(), without_adapter:
            return score_batch(model, batch, self.bfloat16)[0]


def load_policy_models(
    model_dir: str,
    spec: AlgorithmSpec,
    max_context: int | None,
    device: torch.device,
    dtype: torch.dtype,
    part: TrainedPart,
) -> PolicyModels:
    policy = load_model(model_dir, device, dtype)
    adapter = None
    if part.lora is not None:
        # imported here, because it takes a second and few jobs need it
        from tlt.trainer.policy.model.lora_adapter import LoraAdapter

        adapter = LoraAdapter(policy, part.lora, part.seed)
    freeze_weights(policy, part.freeze)
    limit = context_limit(policy, max_context)
    bfloat16 = choose_bfloat16(policy, spec, limit)
    packed = set_attention(policy, spec, limit, bfloat16)
    checkpoint_layers_if_due(policy, spec)
    reference: PreTrainedModel | None = None
    if spec.kl_coefficient > 0 and adapter is None:
        reference = load_model(model_dir, device, dtype).requires_grad_(False)
        set_attention(reference, spec, limit, bfloat16)
    return PolicyModels(
        policy=policy,
        reference=reference,
        spec=spec,
        bfloat16=bfloat16,
        packed=packed,
        adapter=adapter,
    )


def checkpoint_layers_if_due(model: PreTrainedModel, spec: AlgorithmSpec) -> None:
    # a sharded parameter counts all of its numbers
    weights = sum(parameter.numel() for parameter in model.parameters())
    if checkpoints_activations(spec.gradient_checkpointing, weights):
        _checkpoint_layers(model)
    if spec.gradient_checkpointing == "offload" and model.device.type != "cpu":
        offload_saved_tensors(model.base_model)


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """Recompute the layers' activations in the backward pass."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # Transformers checkpoints only layers in training mode; their parts stay free of dropout
    for layer in decoder_layers(model):
        layer.training = True
        # some layers call the dropout function with a rate of their own
        for name, value in vars(layer).items():
            if "drop" in name and isinstance(value, float):
                setattr(layer, name, 0.0)


def offload_saved_tensors(model: nn.Module) -> None:
    """Keep on the host what a forward pass saves outside of checkpointed layers: their inputs."""
    forward = model.forward

    def offloaded(*arguments: Any, **options: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return forward(*arguments, **options)

    model.forward = offloaded
