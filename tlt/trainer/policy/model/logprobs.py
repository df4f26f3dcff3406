"""Only completion tokens meet the vocabulary, in chunks of at most CHUNK_LOGITS logits."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tlt.trainer.policy.model.micro_batches import MicroBatch
from tlt.trainer.policy.model.model_loading import last_hidden_states, output_head

# 256 MiB of float32 logits; beyond that the backward pass computes them again
CHUNK_LOGITS = 2**26


def score_batch(
    model: PreTrainedModel, batch: MicroBatch, bfloat16: bool, learn_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-prob and entropy of every completion token, in the micro-batch's order.

    Entropies have gradients only if they are learned from.
    """
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=bfloat16):
        hidden = last_hidden_states(model, batch.tokens, batch.bounds, batch.longest)
    predicting = hidden.flatten(0, 1).index_select(0, batch.positions)
    return score_tokens(
        predicting, output_head(model), batch.targets, batch.temperature, learn_entropy
    )


def score_tokens(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    temperature: Tensor,
    learn_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return each target's log-prob and its distribution's entropy, at the sample's temperature."""
    vocabulary = head.get_parameter("weight").shape[0]
    rows = max(1, CHUNK_LOGITS // vocabulary)
    if len(targets) <= rows:
        return _score_chunk(hidden, head, targets, temperature, learn_entropy)
    parts = [
        checkpoint(_score_chunk, states, head, ids, heat, learn_entropy, use_reentrant=False)
        for states, ids, heat in zip(
            hidden.split(rows), targets.split(rows), temperature.split(rows), strict=True
        )
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _score_chunk(
    hidden: Tensor, head: nn.Module, targets: Tensor, temperature: Tensor, learn_entropy: bool
) -> tuple[Tensor, Tensor]:
    # no autocast: bfloat16 logits are off by more than the ratios that the loss clips
    with torch.autocast(hidden.device.type, enabled=False):
        logits: Tensor = head(hidden.to(head.get_parameter("weight").dtype))
    distribution = (logits / temperature[:, None]).log_softmax(-1)
    with torch.set_grad_enabled(learn_entropy and torch.is_grad_enabled()):
        entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, targets[:, None])[:, 0], entropy
