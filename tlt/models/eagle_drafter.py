"""One decoder layer that guesses the policy's next tokens, in the two layouts that SGLang loads.

To guess the token after token i+1, the drafter reads that token's embedding and position i's
feature: from the policy's states where they are known, otherwise from its own last output.
Parameters have the names of the checkpoint files; embedding and usually head are the policy's.
"""

import hashlib
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlt.base.id_types import Digest
from tlt.models.decoder_spec import DecoderConfig
from tlt.models.float32_product import multiply_wide
from tlt.models.rope import Rope, rotary_table

# queries [..., heads, tokens, width], keys and values with fewer heads -> like the queries
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True):
    # `eagle` reads the policy's last state, after its final norm; `eagle3` some of its layers'
    layout: Literal["eagle", "eagle3"]
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_positions: int
    vocabulary: int
    # layers whose inputs are read; the number of layers stands for the last one's output
    captured: tuple[int, ...] = ()
    # eagle3 only: rows of the drafter's own head; None if it uses the policy's
    own_head: int | None = None
    # rows of the policy's head that it uses, and which its tokens name; None if it uses all
    hot_tokens: int | None = None

    @property
    def listed_tokens(self) -> int | None:
        """Return how many tokens it can propose, or None if it can propose all."""
        return self.hot_tokens if self.own_head is None else self.own_head


def architecture(config: DrafterConfig) -> Digest:
    """Return a digest; drafters with equal digests are interchangeable."""
    fields = msgspec.to_builtins(config)
    if config.hot_tokens is None:
        del fields["hot_tokens"]  # as in digests of earlier versions
    return Digest(hashlib.blake2b(msgspec.json.encode(fields), digest_size=20).hexdigest())


class DrafterOutput(NamedTuple):
    # input of the head
    readout: Tensor
    # replaces the policy's feature in the next step
    feature: Tensor


class _WithHead(nn.Module):
    """Proposes with the policy's head, with some of its rows, or with a head of its own."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.lm_head: nn.Linear | None = None
        if config.own_head is not None:
            self.lm_head = nn.Linear(config.hidden, config.own_head, bias=False)
        listed = config.listed_tokens
        # by column of the logits: the policy's token, less the column's own number
        self.d2t: Tensor | None
        self.register_buffer("d2t", None if listed is None else torch.zeros(listed).long())

    @property
    def tokens(self) -> Tensor | None:
        """Return the tokens that columns of the logits stand for; None if they are the tokens."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_tokens(self, tokens: Tensor) -> None:
        assert self.d2t is not None
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))

    def head(self, policy_head: Tensor) -> Tensor:
        """Return the matrix that the readout is multiplied with, contiguous."""
        if self.lm_head is not None:
            return self.lm_head.weight
        tokens = self.tokens
        return policy_head if tokens is None else policy_head[tokens]

    def logits(self, readout: Tensor, policy_head: Tensor) -> Tensor:
        return multiply_wide(readout, self.head(policy_head))

    def token_ids(self, columns: Tensor) -> Tensor:
        """Return the tokens that columns of the logits stand for."""
        tokens = self.tokens
        return columns if tokens is None else tokens[columns]


class Eagle(_WithHead):
    """Reads the policy's last hidden state, after its final norm."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden, config.hidden)
        # checkpoints name it as a list of one layer
        self.layers = nn.ModuleList([_Layer(config, inputs=config.hidden)])
        self.rotary = RotaryTable(config)

    def feature(self, states: Tensor) -> Tensor:
        """Compute the feature from the policy's states [..., 1, hidden]."""
        return states.flatten(-2)

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> DrafterOutput:
        """Combine token i+1's embedding with position i's feature, at position i."""
        merged = self.fc(torch.cat([embeddings, features], dim=-1))
        out = self.layers[0](merged, merged, self.rotary(positions), attend)
        return DrafterOutput(out, out)


class Eagle3(_WithHead):
    """Reads the inputs of some of the policy's layers."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(len(config.captured) * config.hidden, config.hidden, bias=False)
        self.midlayer = _MergingLayer(config)
        self.norm = _norm(config)
        self.rotary = RotaryTable(config)

    def feature(self, states: Tensor) -> Tensor:
        """Compute the feature from the policy's states [..., captured layers, hidden]."""
        return self.fc(states.flatten(-2))

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> DrafterOutput:
        """Combine token i+1's embedding with position i's feature, at position i."""
        out = self.midlayer.merge(embeddings, features, self.rotary(positions), attend)
        return DrafterOutput(self.norm(out), out)


Drafter = Eagle | Eagle3


def new_drafter(config: DrafterConfig) -> Drafter:
    return Eagle(config) if config.layout == "eagle" else Eagle3(config)


def describe_misfit(drafter: Drafter, policy: DecoderConfig) -> str | None:
    """Say in a few words why a drafter can't guess for this policy; None if it can."""
    config = drafter.config
    if (complaint := _describe_wrong_shape(config, policy)) is not None:
        return complaint
    for name, weight in drafter.state_dict().items():
        if not weight.isfinite().all():
            return f"{name} {list(weight.shape)} holds what is not a number"
    tokens = drafter.tokens
    if tokens is not None and (tokens.min() < 0 or tokens.max() >= config.vocabulary):
        return f"d2t [{len(tokens)}] names tokens beyond the vocabulary"
    return None


def _describe_wrong_shape(config: DrafterConfig, policy: DecoderConfig) -> str | None:
    for name in ("vocabulary", "hidden"):
        own, expected = getattr(config, name), getattr(policy, name)
        if own != expected:
            return f"its {name} is {own}, the policy's {expected}"
    if config.heads % config.kv_heads:
        return f"its {config.heads} heads cannot share {config.kv_heads} keys"
    if config.head_dim % 2:
        return f"its heads are {config.head_dim} wide, an odd number"
    if config.rope.theta != policy.rope.theta:
        return f"its rope theta is {config.rope.theta:g}, the policy's {policy.rope.theta:g}"
    layers = config.captured
    if config.layout == "eagle" and layers != (policy.layers,):
        return f"it reads layers {list(layers)}, and EAGLE's reads what follows the last one"
    if len(set(layers)) < len(layers) or not all(0 <= n <= policy.layers for n in layers):
        return f"it reads layers {list(layers)} of {policy.layers}"
    return None


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig, inputs: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, inputs)
        self.post_attention_layernorm = _norm(config)
        self.mlp = _FeedForward(config)

    def forward(self, inputs: Tensor, residual: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        residual = residual + self.self_attn(inputs, rotation, attend)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class _MergingLayer(_Layer):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config, inputs=2 * config.hidden)
        self.input_layernorm = _norm(config)
        self.hidden_norm = _norm(config)

    def merge(
        self, embeddings: Tensor, features: Tensor, rotation: Tensor, attend: Attend
    ) -> Tensor:
        merged = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(features)], dim=-1)
        return self(merged, features, rotation, attend)


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig, inputs: int) -> None:
        super().__init__()
        self._dim = config.head_dim
        queries, pairs = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=False)
        self.k_proj = nn.Linear(inputs, pairs, bias=False)
        self.v_proj = nn.Linear(inputs, pairs, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden, bias=False)

    def forward(self, inputs: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        q, k, v = (
            projection(inputs).unflatten(-1, (-1, self._dim)).transpose(-3, -2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = attend(_rotate(q, rotation), _rotate(k, rotation), v)
        return self.o_proj(attended.transpose(-3, -2).flatten(-2))


class _FeedForward(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RotaryTable:
    """Rotations of queries and keys by position; no part of the checkpoint."""

    def __init__(self, config: DrafterConfig) -> None:
        self._config = config
        self._table = torch.empty(0)

    def reserve(self, end: int, device: torch.device) -> None:
        """Make room for positions below `end`."""
        config = self._config
        if len(self._table) < end or self._table.device != device:
            # published drafters declare fewer positions than long answers have
            rows = max(config.max_positions, end)
            self._table = rotary_table(config.rope, config.head_dim, rows, device)

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the rotations; on an accelerator, room for all positions must be reserved."""
        # the host would wait for an accelerator to tell the largest position
        if positions.device.type == "cpu" or self._table.device != positions.device:
            self.reserve(int(positions.max()) + 1 if positions.numel() else 0, positions.device)
        return self._table[positions]


def _norm(config: DrafterConfig) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden, eps=config.norm_eps)


def _rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """Rotate [..., heads, tokens, width], whose pairs lie half a width apart."""
    pairs = (
        torch.complex(*heads.to(rotation.real.dtype).chunk(2, dim=-1)) * rotation[..., None, :, :]
    )
    return torch.cat([pairs.real, pairs.imag], dim=-1).to(heads.dtype)
