"""Only completion tokens meet the vocabulary, in chunks of at most CHUNK_LOGITS logits.

A chunk's logits are one tensor: log-probs and then gradients are written over them, a block of rows
at a time. Those of the last chunk stay for the backward pass; all others are computed again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import PreTrainedModel

from tlt.trainer.policy.model.micro_batches import MicroBatch
from tlt.trainer.policy.model.model_loading import last_hidden_states, output_head

# 256 MiB of float32 logits
CHUNK_LOGITS = 2**26
# logits of a block; many small ones cost launches on a GPU, and on a CPU barriers between threads
BLOCK_LOGITS = 2**24


def score_batch(
    model: PreTrainedModel, batch: MicroBatch, bfloat16: bool, learn_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-prob and entropy of every completion token, in the micro-batch's order.

    Entropies have gradients only if they are learned from.
    """
    return score_tokens(
        _predicting_states(model, batch, bfloat16),
        output_head(model),
        batch.targets,
        batch.temperature,
        learn_entropy,
    )


def _predicting_states(model: PreTrainedModel, batch: MicroBatch, bfloat16: bool) -> Tensor:
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=bfloat16):
        hidden = last_hidden_states(model, batch.tokens, batch.bounds, batch.longest)
    return hidden.flatten(0, 1).index_select(0, batch.positions)


def score_tokens(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    temperature: Tensor,
    learn_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return each target's log-prob and its distribution's entropy, at the sample's temperature."""
    # there are fewer states than logits to divide
    hidden = hidden / temperature[:, None]
    weight, bias = head.get_parameter("weight"), getattr(head, "bias", None)
    return _Scores.apply(hidden, weight, bias, targets, temperature, learn_entropy)  # pyright: ignore


class _Head(NamedTuple):
    weight: Tensor
    bias: Tensor | None

    def chunks(self, tokens: int) -> list[slice]:
        """Divide tokens evenly."""
        most = max(1, CHUNK_LOGITS // len(self.weight))
        return _slices(tokens, -(-tokens // -(-tokens // most)))

    def log_distribution(self, hidden: Tensor, temperature: Tensor) -> Tensor:
        """Return log-probs of all tokens, given states that are divided by the temperature."""
        # no autocast: bfloat16 logits are off by more than the ratios that the loss clips
        with torch.autocast(hidden.device.type, enabled=False):
            logits = functional.linear(hidden.to(self.weight.dtype), self.weight)
        table = logits.to(hidden.dtype)
        if self.bias is not None:
            table.addr_(1.0 / temperature.to(table.dtype), self.bias.to(table.dtype))
        for rows in _blocks(table):
            table[rows] = table[rows].log_softmax(-1)
        return table


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        learn_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(weight, bias)
        logprobs: list[Tensor] = []
        parts: list[Tensor] = []
        table = None
        for rows in head.chunks(len(targets)):
            # freed before the next one is made
            table = None
            table = head.log_distribution(hidden[rows], temperature[rows])
            logprobs.append(table.gather(1, targets[rows, None])[:, 0])
            parts += [-table[each].exp().mul_(table[each]).sum(-1) for each in _blocks(table)]
        entropies = torch.cat(parts)
        if not learn_entropy:
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, entropies)
        ctx.table, ctx.learn_entropy = table, learn_entropy
        return torch.cat(logprobs), entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden, weight, bias, targets, temperature, entropies = ctx.saved_tensors
        head, (of_hidden, of_weight, of_bias, *_) = _Head(weight, bias), ctx.needs_input_grad
        hidden_slope = torch.empty_like(hidden, dtype=weight.dtype) if of_hidden else None
        weight_slope = bias_slope = None
        # another backward pass through the same graph computes it again
        table, ctx.table = ctx.table, None
        for rows in reversed(head.chunks(len(targets))):
            if table is None:
                table = head.log_distribution(hidden[rows], temperature[rows])
            learned = (entropies[rows], slopes[1][rows]) if ctx.learn_entropy else None
            _write_slopes(table, targets[rows], slopes[0][rows], learned)
            error = table.to(weight.dtype)
            if hidden_slope is not None:
                torch.mm(error, weight, out=hidden_slope[rows])
            if of_weight:
                weight_slope = _add_product(weight_slope, error.T, hidden[rows].to(weight.dtype))
            if of_bias:
                scale = 1.0 / temperature[rows, None].to(table.dtype)
                bias_slope = _add_product(bias_slope, table.T, scale)
            table = error = None
        bias_slope = None if bias_slope is None else bias_slope[:, 0]
        return hidden_slope, weight_slope, bias_slope, None, None, None


def _write_slopes(
    table: Tensor, targets: Tensor, slope: Tensor, learned: tuple[Tensor, Tensor] | None
) -> None:
    """Replace log-probs by slopes of the logits, given those of the targets' log-probs.

    `learned` are the entropies and their slopes.
    """
    constant = -slope if learned is None else -slope - learned[0] * learned[1]
    for rows in _blocks(table):
        block, factor = table[rows], constant[rows, None]
        if learned is not None:
            factor = (block * -learned[1][rows, None]).add_(factor)
        block.exp_().mul_(factor)
    table.scatter_add_(1, targets[:, None], slope[:, None])


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    return left @ right if total is None else total.addmm_(left, right)


def _blocks(table: Tensor) -> list[slice]:
    return _slices(len(table), BLOCK_LOGITS // table.shape[1])


def _slices(count: int, size: int) -> list[slice]:
    size = max(1, size)
    return [slice(first, first + size) for first in range(0, count, size)]
