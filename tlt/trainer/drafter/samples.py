"""A sample for drafter training: one sequence, and the policy's hidden states at its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.models.decoder_spec import EMBEDDING, HEAD, Decoder
from tlt.models.eagle_drafter import DrafterConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class DrafterSample:
    tokens: Sequence[int]
    # tokens of the prompt, which the policy did not choose
    prompt: int
    # [tokens but the last, layers, hidden], at the layers that `state_layers` lists
    states: Tensor

    def __post_init__(self) -> None:
        if len(self.tokens) < 3 or not 1 <= self.prompt < len(self.tokens):
            raise ValueError("a sample needs three tokens, a prompt and an answer")
        if self.states.dim() != 3 or len(self.states) != len(self.tokens) - 1:
            raise ValueError("a sample needs the states of all its tokens but the last")

    @property
    def rows(self) -> int:
        """Count the positions at which a guess can be measured."""
        return len(self.tokens) - 2

    @property
    def first(self) -> int:
        """Return the row that guesses the answer's first token, or its second one."""
        return max(0, self.prompt - 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingAndHead:
    """The policy's weights that its drafter shares, both [vocabulary, hidden]."""

    embedding: Tensor
    head: Tensor

    @staticmethod
    def of(policy: Decoder, dtype: torch.dtype, device: torch.device) -> "EmbeddingAndHead":
        embedding = policy.weights[EMBEDDING]
        head = embedding if policy.config.tied else policy.weights[HEAD]
        return EmbeddingAndHead(embedding=embedding.to(device, dtype), head=head.to(device, dtype))


def state_layers(config: DrafterConfig, policy_layers: int) -> tuple[int, ...]:
    """List the layers at which states are captured: the drafter's inputs, then the last one."""
    return tuple(dict.fromkeys((*config.captured, policy_layers)))
