"""What a drafter learns from: one sequence, and what the policy's own pass over it left behind."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.models.decoder_spec import EMBEDDING, HEAD, Decoder
from tlt.models.eagle_drafter import DrafterConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class DrafterSample:
    """`states` are [tokens but the last, layers, hidden]; see `state_layers`."""

    tokens: Sequence[int]
    # how many of them the policy did not choose
    prompt: int
    states: Tensor

    def __post_init__(self) -> None:
        if len(self.tokens) < 3 or not 1 <= self.prompt < len(self.tokens):
            raise ValueError("a sample needs three tokens, a prompt and an answer")
        if self.states.dim() != 3 or len(self.states) != len(self.tokens) - 1:
            raise ValueError("a sample needs the states of all its tokens but the last")

    @property
    def rows(self) -> int:
        """Positions at which a guess has something to be measured by."""
        return len(self.tokens) - 2

    @property
    def first(self) -> int:
        """The row from which the answer's first token, or its second one, is guessed."""
        return max(0, self.prompt - 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingAndHead:
    """What a drafter borrows from its policy: both are [vocabulary, hidden]."""

    embedding: Tensor
    head: Tensor

    @staticmethod
    def of(policy: Decoder, dtype: torch.dtype, device: torch.device) -> "EmbeddingAndHead":
        embedding = policy.weights[EMBEDDING]
        head = embedding if policy.config.tied else policy.weights[HEAD]
        return EmbeddingAndHead(embedding=embedding.to(device, dtype), head=head.to(device, dtype))


def state_layers(config: DrafterConfig, policy_layers: int) -> tuple[int, ...]:
    """Where a policy's states are taken: what the drafter reads, and last what gives the logits."""
    return tuple(dict.fromkeys((*config.captured, policy_layers)))
