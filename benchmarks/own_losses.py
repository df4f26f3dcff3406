"""Compute the cases that are compared with TRL and verl by TLT's own code, in float64."""

from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from benchmarks.peer_cases import Case
from benchmarks.peer_inputs import LIMIT, Inputs
from benchmarks.peer_tensors import doubles, score
from tlt.policies.algorithm.advantages import Scored, agree, compute_advantages, overlong_penalty
from tlt.spec.algorithm_presets import apply_preset
from tlt.spec.config import AlgorithmSpec
from tlt.trainer.policy.loss.advantages_in_update import Penalised, Ranks, advantages_in_update
from tlt.trainer.policy.loss.loss_variants import find_token_loss
from tlt.trainer.policy.loss.policy_loss import LogProbs, policy_loss
from tlt.trainer.policy.model.micro_batches import MicroBatch, Minibatch, PolicySample, pad


class Output(NamedTuple):
    """`values` are the gradient by the logits of each token where there is a loss."""

    loss: float | None
    values: list[float]


def compute_own(case: Case, inputs: Inputs) -> Output:
    spec = _spec(case, inputs)
    match case.call:
        case "overlong":
            lengths = inputs.lengths
            return Output(None, [-overlong_penalty(spec, each, LIMIT) for each in lengths])
        case "filtered_groups":
            rewards = ([answer.reward for answer in group] for group in _groups(inputs))
            return Output(None, [float(agree(group)) for group in rewards])
        case "grpo_advantages" | "rloo_advantages" | "advantages":
            return Output(None, _with_advantages(spec, inputs).advantage.tolist())
        case "grpo_loss":
            return _loss(case, spec, inputs, _batch(inputs))
        case _:
            return _loss(case, spec, inputs, _with_advantages(spec, inputs))


def _spec(case: Case, inputs: Inputs) -> AlgorithmSpec:
    written: dict[str, Any] = {
        "steps": 1,
        "prompts_per_step": inputs.groups,
        "group_size": inputs.group_size,
        **case.ours,
    }
    apply_preset({"algorithm": written}, case.key)
    return msgspec.convert(written, AlgorithmSpec)


def _groups(inputs: Inputs) -> list[list[Scored]]:
    size = inputs.group_size
    answers = list(map(Scored, inputs.rewards, inputs.lengths))
    return [answers[first : first + size] for first in range(0, len(answers), size)]


def _with_advantages(spec: AlgorithmSpec, inputs: Inputs) -> MicroBatch:
    """Compute them where the coordinator does, or where ranks do once they have log-probs."""
    batch = _batch(inputs)
    if spec.advantages_in_update:
        penalty = spec.kl_coefficient * (doubles(inputs.old) - doubles(inputs.reference))
        ranks = Ranks(None, torch.device("cpu"))
        (batch,) = advantages_in_update(spec, None, [Penalised(batch, penalty)], ranks)
        return batch
    found = compute_advantages(_groups(inputs), spec.advantage, spec.normalise_advantage)
    # None is for a group in which all are 0
    each = chain.from_iterable(part or [0.0] * inputs.group_size for part in found)
    return replace(batch, advantage=doubles(list(each))[batch.owner])


def _batch(inputs: Inputs) -> MicroBatch:
    ends = accumulate(inputs.lengths)
    samples = [
        PolicySample(
            prompt=(0,),
            completion=inputs.tokens[end - length : end],
            logprobs=inputs.sampler[end - length : end],
            temperature=1.0,
            advantage=advantage,
            reward=reward,
            group=index // inputs.group_size,
        )
        for index, (end, length, advantage, reward) in enumerate(
            zip(ends, inputs.lengths, inputs.advantages, inputs.rewards, strict=True)
        )
    ]
    batch = pad(samples, torch.device("cpu"))
    advantages = doubles(inputs.advantages)[batch.owner]
    return replace(batch, behaviour=doubles(inputs.sampler), advantage=advantages)


def _loss(case: Case, spec: AlgorithmSpec, inputs: Inputs, batch: MicroBatch) -> Output:
    old = doubles(inputs.old)
    if not case.mismatch:
        batch = replace(batch, behaviour=old)
    logits = doubles(inputs.logits).requires_grad_()
    current, entropy = score(logits, inputs.tokens)
    reference = doubles(inputs.reference) if spec.kl_coefficient > 0 else None
    minibatch = Minibatch(
        samples=(), total_tokens=len(inputs.tokens), total_sequences=len(inputs.lengths)
    )
    scores = LogProbs(current, old, reference, entropy)
    loss, _ = policy_loss(spec, find_token_loss(spec), batch, minibatch, scores)
    return Output(loss.item(), _gradient(loss, logits))


def _gradient(loss: Tensor, logits: Tensor) -> list[float]:
    return torch.autograd.grad(loss, logits)[0].flatten().tolist()
