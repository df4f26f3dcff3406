"""The drafter's weights in the layout of its forward pass."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from tlt.engine.native.few_row_products import multiply_by_head
from tlt.engine.native.fused_layer_weights import (
    LayerFiller,
    Linear,
    fill_linear,
    new_layer,
    new_linear,
)
from tlt.models.decoder_spec import DecoderConfig
from tlt.models.eagle_drafter import Drafter, DrafterConfig
from tlt.models.float32_product import wide


class DrafterWeights:
    def __init__(
        self, drafter: Drafter, policy_head: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Copy the drafter's weights, but share `policy_head`, which changes with the policy.

        Of a drafter that uses some of its rows they are copied; `update_head` copies them again.
        """
        self.config = config = drafter.config
        self.shape = _shape(config)
        merging = config.layout == "eagle3"
        inputs = 2 * config.hidden if merging else config.hidden
        self.layer = new_layer(self.shape, inputs, dtype, device)
        weights = drafter.state_dict()

        def weight(name: str) -> torch.Tensor:
            return weights[name].to(device, torch.promote_types(dtype, torch.float32))

        def own(name: str) -> torch.Tensor:
            return weights[name].to(device, dtype, copy=True)

        prefix = "midlayer." if merging else "layers.0."
        entrance = torch.ones(config.hidden, device=device)
        if merging:
            norms = [
                weight(prefix + name + ".weight") for name in ("input_layernorm", "hidden_norm")
            ]
            entrance = torch.cat(norms) * config.hidden**0.5
        LayerFiller(self.shape, self.layer, lambda name: weight(prefix + name)).fill(entrance)
        self.fc = _linear(weights, "fc", dtype, device)
        self.norm = own("norm.weight") if merging else None
        # the tokens of the head's rows, unless they are all tokens in order
        self.tokens = None if (tokens := drafter.tokens) is None else tokens.to(device)
        self._policy_head = policy_head
        self.head = policy_head if config.own_head is None else own("lm_head.weight")
        self.update_head()

    def update_head(self) -> None:
        """Take the policy's rows as they are now; in place, as captured graphs need it."""
        if self.config.hot_tokens is None:
            return
        assert self.tokens is not None
        if self.head is self._policy_head:
            self.head = self._policy_head.new_empty(len(self.tokens), self.config.hidden)
        torch.index_select(self._policy_head, 0, self.tokens, out=self.head)

    @property
    def bytes(self) -> int:
        """Count the drafter's own weights and its copy of the policy's rows."""
        linears = (self.layer.qkv, self.layer.out, self.layer.gate_up, self.layer.down, self.fc)
        parts = [part for linear in linears for part in linear]
        head = None if self.head is self._policy_head else self.head
        parts += [self.norm, head, self.tokens]
        return sum(part.nbytes for part in parts if part is not None)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm is not None:
            x = F.rms_norm(x, (self.config.hidden,), self.norm, self.config.norm_eps)
        out = x.new_empty(len(x), len(self.head), dtype=wide(self.head.dtype))
        return multiply_by_head(x, self.head, out)


def _linear(
    weights: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype, device: torch.device
) -> Linear:
    matrix, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    linear = new_linear(len(matrix), matrix.shape[1], bias is not None, dtype, device)
    fill_linear(linear, matrix, *([] if bias is None else [bias]))
    return linear


def _shape(config: DrafterConfig) -> DecoderConfig:
    """Describe the drafter's layer as a model of one layer."""
    return DecoderConfig(
        vocabulary=config.vocabulary,
        hidden=config.hidden,
        intermediate=config.intermediate,
        layers=1,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        rope=config.rope,
        max_positions=config.max_positions,
        tied=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        head_norms=False,
    )
