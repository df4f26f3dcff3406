"""Initialise a drafter for a policy that has none yet: the policy's shape, random weights.

A policy's embeddings are small and its hidden states may be large; the first layer's weights are
scaled so that both weigh the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tlt.errors import UnsupportedModel
from tlt.models.decoder_spec import DecoderConfig
from tlt.models.drafter_folder import default_captured_layers
from tlt.models.eagle_drafter import Drafter, DrafterConfig, describe_misfit, new_drafter
from tlt.models.float32_product import wide
from tlt.models.rope import PlainRope
from tlt.trainer.drafter.samples import DrafterSample

_MEASURED_SAMPLES = 32


def drafter_config_for(policy: DecoderConfig, layout: str) -> DrafterConfig:
    captured = (policy.layers,) if layout == "eagle" else default_captured_layers(policy.layers)
    return DrafterConfig(
        layout="eagle" if layout == "eagle" else "eagle3",
        hidden=policy.hidden,
        intermediate=policy.intermediate,
        heads=policy.heads,
        kv_heads=policy.kv_heads,
        head_dim=policy.head_dim,
        norm_eps=policy.norm_eps,
        rope=PlainRope(theta=policy.rope.theta),
        max_positions=policy.max_positions,
        vocabulary=policy.vocabulary,
        captured=captured,
    )


def measure_input_sizes(
    config: DrafterConfig, embedding: Tensor, samples: Sequence[DrafterSample]
) -> Tensor:
    """Return the root mean square of the inputs that each column of `fc` is multiplied with."""
    measured = samples[:_MEASURED_SAMPLES]
    states = torch.cat([sample.states[:, : len(config.captured)] for sample in measured])
    inputs = [states[:, layer] for layer in range(len(config.captured))]
    if config.layout == "eagle":
        tokens = torch.tensor([token for sample in measured for token in sample.tokens])
        inputs.insert(0, embedding[tokens.to(embedding.device)])
    sizes = torch.tensor([x.float().square().mean().sqrt().item() for x in inputs])
    return sizes.to(embedding.device, wide(embedding.dtype)).repeat_interleave(config.hidden)


def initialise_drafter(config: DrafterConfig, sizes: Tensor, seed: int) -> Drafter:
    """Return random weights for inputs of these sizes; what joins the residual starts small."""
    drafter = new_drafter(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 2:
            gain = 0.5 if "o_proj" in name or "down_proj" in name else 0.8
            nn.init.normal_(parameter, std=gain * parameter.shape[1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    with torch.no_grad():
        drafter.fc.weight.div_(sizes.to(drafter.fc.weight))
    return drafter


def require_drafter_fits(drafter: Drafter, policy: DecoderConfig, name: str) -> None:
    """Raise UnsupportedModel if a drafter made elsewhere can't guess for this policy."""
    if (complaint := describe_misfit(drafter, policy)) is not None:
        raise UnsupportedModel(f"{name}: {complaint}")
