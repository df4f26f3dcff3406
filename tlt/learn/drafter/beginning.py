"""A drafter for a policy that has none yet: its shape is the policy's, its weights are random."""

import torch
from torch import nn

from tlt.errors import ConfigError
from tlt.models.decoder import DecoderConfig
from tlt.models.drafter import Drafter, DrafterConfig, new_drafter
from tlt.models.drafter_folder import default_layers
from tlt.models.rope import PlainRope


def config_for(policy: DecoderConfig, layout: str) -> DrafterConfig:
    captured = (policy.layers,) if layout == "eagle" else default_layers(policy.layers)
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


def begin(config: DrafterConfig, seed: int) -> Drafter:
    drafter = new_drafter(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 2:
            gain = 0.5 if "o_proj" in name or "down_proj" in name else 0.8
            nn.init.normal_(parameter, std=gain * parameter.shape[1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return drafter


def require_fit(drafter: DrafterConfig, policy: DecoderConfig) -> None:
    for name, ours, theirs in (
        ("hidden size", drafter.hidden, policy.hidden),
        ("vocabulary", drafter.vocabulary, policy.vocabulary),
    ):
        if ours != theirs:
            raise ConfigError(f"the drafter's {name} is {ours}, its policy's {theirs}")
    if strange := [layer for layer in drafter.captured if not 0 <= layer <= policy.layers]:
        raise ConfigError(
            f"the drafter reads layer {strange[0]} of a policy that has {policy.layers}"
        )
