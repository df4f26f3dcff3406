"""Initialise a drafter for a policy that has none yet: the policy's shape, random weights.

A policy's embeddings are small and its hidden states may be large; the first layer's weights are
scaled so that both weigh the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tlt.base.interrupt_check import CheckInterrupt, never_interrupt
from tlt.errors import UnsupportedModel
from tlt.models.decoder_spec import DecoderConfig
from tlt.models.drafter_folder import default_captured_layers
from tlt.models.eagle_drafter import Drafter, DrafterConfig, describe_misfit, new_drafter
from tlt.models.float32_product import multiply_wide, wide
from tlt.models.rope import PlainRope
from tlt.trainer.drafter.interruptible_matmul import work_per_check
from tlt.trainer.drafter.samples import DrafterSample

_MEASURED_SAMPLES = 32
_MEASURED_STATES = 512


def drafter_config_for(
    policy: DecoderConfig, layout: str, hot_tokens: int | None = None
) -> DrafterConfig:
    """Describe a new drafter that can propose `hot_tokens`, or all tokens if None or if fewer."""
    if hot_tokens is not None and hot_tokens >= policy.vocabulary:
        hot_tokens = None
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
        hot_tokens=hot_tokens,
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


@torch.no_grad()
def choose_tokens(
    drafter: Drafter,
    head: Tensor,
    samples: Sequence[DrafterSample],
    check: CheckInterrupt = never_interrupt,
) -> None:
    """Let a drafter that can't propose all tokens propose what the policy draws most often.

    The policy's mean distribution in the answers tells it from a few of them; the tokens that they
    happen to contain would cover less of the next answers.
    """
    if drafter.config.hot_tokens is None:
        return
    states = torch.cat([s.states[s.prompt - 1 :, -1] for s in samples[:_MEASURED_SAMPLES]])
    some = torch.linspace(0, len(states) - 1, min(len(states), _MEASURED_STATES)).long()
    total = torch.zeros(len(head), device=head.device)
    for part in states[some].to(head).split(max(1, work_per_check(head) // head.numel())):
        check()
        total += multiply_wide(part, head).softmax(-1).sum(0)
    drafter.set_tokens(total.topk(drafter.config.hot_tokens).indices.sort().values)


def require_drafter_fits(drafter: Drafter, policy: DecoderConfig, name: str) -> None:
    """Raise UnsupportedModel if a drafter made elsewhere can't guess for this policy."""
    if (complaint := describe_misfit(drafter, policy)) is not None:
        raise UnsupportedModel(f"{name}: {complaint}")
