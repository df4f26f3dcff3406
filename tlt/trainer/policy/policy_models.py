"""The policy, its frozen reference, and how both are computed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tlt.config import AlgorithmSpec
from tlt.policies.job.activation_checkpointing import checkpoints_activations
from tlt.trainer.policy.attention_choice import set_attention
from tlt.trainer.policy.layer_probe import decoder_layers
from tlt.trainer.policy.logprobs import score_batch
from tlt.trainer.policy.micro_batches import MicroBatch, build_micro_batches
from tlt.trainer.policy.model_loading import context_limit, load_model
from tlt.trainer.policy.precision_choice import choose_bfloat16
from tlt.trainer.policy.samples import PolicySample


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyModels:
    policy: PreTrainedModel
    reference: PreTrainedModel | None
    spec: AlgorithmSpec
    bfloat16: bool
    packed: bool

    @property
    def device(self) -> torch.device:
        return self.policy.device

    def micro_batches(self, samples: Sequence[PolicySample]) -> list[MicroBatch]:
        return build_micro_batches(samples, self.spec.microbatch_tokens, self.device, self.packed)

    def score(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy of each completion token."""
        return score_batch(self.policy, batch, self.bfloat16, self.spec.entropy_coefficient > 0)

    def score_reference(self, batch: MicroBatch) -> Tensor | None:
        """Return the frozen reference's log-probs, if there is one."""
        if self.reference is None:
            return None
        with torch.no_grad():
            return score_batch(self.reference, batch, self.bfloat16)[0]

    def logprobs(self, batch: MicroBatch) -> Tensor:
        with torch.no_grad():
            return self.score(batch)[0]


def load_policy_models(
    model_dir: str,
    spec: AlgorithmSpec,
    max_context: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> PolicyModels:
    policy = load_model(model_dir, device, dtype)
    limit = context_limit(policy, max_context)
    bfloat16 = choose_bfloat16(policy, spec, limit)
    packed = set_attention(policy, spec, limit, bfloat16)
    checkpoint_layers_if_due(policy, spec)
    reference: PreTrainedModel | None = None
    if spec.kl_coefficient > 0:
        reference = load_model(model_dir, device, dtype).requires_grad_(False)
        set_attention(reference, spec, limit, bfloat16)
    return PolicyModels(
        policy=policy, reference=reference, spec=spec, bfloat16=bfloat16, packed=packed
    )


def checkpoint_layers_if_due(model: PreTrainedModel, spec: AlgorithmSpec) -> None:
    # a sharded parameter counts all of its numbers
    weights = sum(parameter.numel() for parameter in model.parameters())
    if checkpoints_activations(spec.gradient_checkpointing, weights):
        _checkpoint_layers(model)


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
