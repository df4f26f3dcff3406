"""Compute naive GRPO: one sequence at a time, all logits, float64, torch's AdamW."""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.trainer.models import samples
from tlt.spec.config import AlgorithmSpec
from tlt.trainer.policy.model.micro_batches import PolicySample


def load(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )


def logprobs(model: PreTrainedModel, sample: PolicySample) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor([[*sample.prompt, *sample.completion]])
    logits = model(input_ids=tokens).logits[0] / sample.temperature
    table = logits.log_softmax(-1)[len(sample.prompt) - 1 : -1]
    chosen = torch.stack([table[i, token] for i, token in enumerate(sample.completion)])
    return chosen, -(table.exp() * table).sum(-1)


def drawn_by(folder: str, count: int, seed: int) -> list[PolicySample]:
    """Make samples with the policy's log-probs."""
    model = load(folder)
    made = samples(count, seed)
    with torch.no_grad():
        known = [logprobs(model, sample)[0].tolist() for sample in made]
    return [replace(s, logprobs=tuple(found)) for s, found in zip(made, known, strict=True)]


def loss(
    spec: AlgorithmSpec,
    model: PreTrainedModel,
    minibatch: list[PolicySample],
    old: list[Tensor],
    frozen: PreTrainedModel | None,
) -> Tensor:
    per_sequence: list[Tensor] = []
    for sample, before in zip(minibatch, old, strict=True):
        current, entropy = logprobs(model, sample)
        ratio = torch.exp(current - before)
        bounded = torch.clamp(ratio, 1 - spec.clip_low, 1 + spec.clip_high)
        advantage = torch.tensor(sample.advantage, dtype=torch.float64)
        gap = torch.exp(before - torch.tensor(sample.logprobs, dtype=torch.float64))
        weight = torch.minimum(gap, torch.tensor(spec.importance_cap, dtype=torch.float64))
        surrogate = torch.min(ratio * advantage, bounded * advantage)
        if sample.advantage < 0:
            surrogate = torch.max(surrogate, spec.dual_clip * advantage)
        token_loss = -surrogate * weight
        if frozen is not None:
            with torch.no_grad():
                anchor, _ = logprobs(frozen, sample)
            difference = anchor - current
            k3 = torch.exp(difference) - difference - 1
            token_loss = token_loss + spec.kl_coefficient * k3
        token_loss = token_loss - spec.entropy_coefficient * entropy
        per_sequence.append(token_loss)
    if spec.averaging == "token":
        return torch.cat(per_sequence).sum() / sum(len(s.completion) for s in minibatch)
    return torch.stack([tokens.mean() for tokens in per_sequence]).mean()


def update(
    spec: AlgorithmSpec, folder: str, minibatches: list[list[PolicySample]], rate: float
) -> tuple[PreTrainedModel, list[float], list[float]]:
    """Return the model after the update, and each minibatch's loss and gradient norm."""
    model = load(folder)
    frozen = load(folder) if spec.kl_coefficient > 0 else None
    with torch.no_grad():
        old = [[logprobs(model, sample)[0] for sample in batch] for batch in minibatches]
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=spec.betas, weight_decay=spec.weight_decay
    )
    losses: list[float] = []
    norms: list[float] = []
    for batch, before in zip(minibatches, old, strict=True):
        optimiser.zero_grad()
        value = loss(spec, model, batch, before, frozen)
        value.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), spec.gradient_clip)))
        optimiser.step()
        losses.append(value.item())
    return model, losses, norms
