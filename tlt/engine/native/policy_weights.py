"""The policy's weights in the layout of the forward pass; new ones are written in place."""

from collections.abc import Mapping

import torch

from tlt.engine.native.fused_layer_weights import Layer, LayerFiller, new_layer
from tlt.models.decoder_spec import EMBEDDING, FINAL_NORM, HEAD, DecoderConfig


class PolicyWeights:
    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        def buffer(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        self.config = config
        hidden = config.hidden
        self.layers = [new_layer(config, hidden, dtype, device) for _ in range(config.layers)]
        self.embedding = buffer(config.vocabulary, hidden)
        self.norm = buffer(hidden)
        self.head = self.embedding if config.tied else buffer(config.vocabulary, hidden)

    @property
    def is_exact(self) -> bool:
        """Return True if rounding is too small to change what is sampled, but for exact ties."""
        return self.embedding.device.type == "cpu" and self.embedding.dtype.itemsize >= 4

    @torch.inference_mode()
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        for index, layer in enumerate(self.layers):
            self._load_layer(layer, weights, f"model.layers.{index}.")
        self.embedding.copy_(weights[EMBEDDING])
        self.norm.copy_(weights[FINAL_NORM])
        if not self.config.tied:
            self.head.copy_(weights[HEAD])

    def _load_layer(self, layer: Layer, weights: Mapping[str, torch.Tensor], prefix: str) -> None:
        device = self.embedding.device
        # wide, so that products of weights are rounded only once, when they are stored
        wide = torch.promote_types(self.embedding.dtype, torch.float32)

        def weight(name: str) -> torch.Tensor:
            return weights[prefix + name].to(device, wide)

        entrance = weight("input_layernorm.weight") * self.config.hidden**0.5
        LayerFiller(self.config, layer, weight).fill(entrance)
