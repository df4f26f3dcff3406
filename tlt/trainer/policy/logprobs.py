"""Only completion tokens meet the vocabulary, and never more of them at once than CHUNK logits."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tlt.trainer.policy.micro_batches import MicroBatch
from tlt.trainer.policy.model_loading import head, states

# 256 MiB of float32 logits; beyond that they are computed again in the backward pass, not kept.
CHUNK = 2**26


def score_batch(model: PreTrainedModel, batch: MicroBatch, bfloat16: bool) -> tuple[Tensor, Tensor]:
    """Of every completion token, in the order of the micro-batch's other tensors."""
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=bfloat16):
        hidden = states(model, batch.tokens, batch.bounds)
    chosen = hidden.flatten(0, 1).index_select(0, batch.positions)
    return score(chosen, head(model), batch.targets, batch.temperature)


def score(
    hidden: Tensor, head: nn.Module, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, both at the sample's temperature."""
    vocabulary = head.get_parameter("weight").shape[0]
    rows = max(1, CHUNK // vocabulary)
    if len(targets) <= rows:
        return _score(hidden, head, targets, temperature)
    parts = [
        checkpoint(_score, states, head, ids, heat, use_reentrant=False)
        for states, ids, heat in zip(
            hidden.split(rows), targets.split(rows), temperature.split(rows), strict=True
        )
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _score(
    hidden: Tensor, head: nn.Module, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    # bfloat16 logits are off by more than the ratios that the loss clips: no autocast here.
    with torch.autocast(hidden.device.type, enabled=False):
        logits: Tensor = head(hidden.float())
    distribution = (logits / temperature[:, None]).log_softmax(-1)
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, targets[:, None])[:, 0], entropy
