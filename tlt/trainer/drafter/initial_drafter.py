"""A drafter for a policy that has none yet: its shape is the policy's, its weights are random.

A policy's embeddings are small and its states may be large: what they pass first makes up for it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tlt.errors import UnsupportedModel
from tlt.models.decoder_spec import DecoderConfig
from tlt.models.drafter_folder import default_captured_layers
from tlt.models.eagle_drafter import Drafter, DrafterConfig, describe_misfit, new_drafter
from tlt.models.rope import PlainRope
from tlt.trainer.drafter.samples import DrafterSample

# samples, of which a few say how large inputs are
_MEASURED = 32


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
    """The root mean square of what each column of `fc` is multiplied with."""
    some = samples[:_MEASURED]
    states = torch.cat([sample.states[:, : len(config.captured)] for sample in some])
    inputs = [states[:, place] for place in range(len(config.captured))]
    if config.layout == "eagle":
        tokens = torch.tensor([token for sample in some for token in sample.tokens])
        inputs.insert(0, embedding[tokens.to(embedding.device)])
    sizes = torch.tensor([x.float().square().mean().sqrt().item() for x in inputs])
    return sizes.to(embedding).repeat_interleave(config.hidden)


def initialise_drafter(config: DrafterConfig, sizes: Tensor, seed: int) -> Drafter:
    """For inputs of these sizes; what is added to the residual starts small."""
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
    """Before anything is computed with a drafter that was made elsewhere."""
    if (complaint := describe_misfit(drafter, policy)) is not None:
        raise UnsupportedModel(f"{name}: {complaint}")
