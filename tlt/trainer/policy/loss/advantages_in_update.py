"""Compute advantages that need log-probs, or that a function of the user's computes.

Every rank learns the reward, the penalty and the length of all answers of the update, and computes
the same advantages.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tlt.base.own_functions import load_tensor_function
from tlt.errors import ConfigError
from tlt.policies.algorithm.advantages import Scored, compute_advantages
from tlt.spec.config import AlgorithmSpec
from tlt.spec.data_and_algorithm import is_own_function
from tlt.trainer.collectives import reduce_sum
from tlt.trainer.policy.model.micro_batches import MicroBatch

# of answers: rewards, groups and lengths, to advantages
AdvantageFunction = Callable[[Tensor, Tensor, Tensor], Tensor]

_EPSILON = 1e-6


def find_own_advantage(spec: AlgorithmSpec) -> AdvantageFunction | None:
    """Return the user's function, or None where the spec names a built-in one."""
    if not is_own_function(spec.advantage):
        return None
    return load_tensor_function("algorithm.advantage", spec.advantage)


class Ranks(NamedTuple):
    """The ranks that update the policy together, and this one's device."""

    group: ProcessGroup | None
    device: torch.device


class Penalised(NamedTuple):
    """A micro-batch, and what each of its tokens loses for having left the reference."""

    batch: MicroBatch
    penalty: Tensor | None


def advantages_in_update(
    spec: AlgorithmSpec,
    own_function: AdvantageFunction | None,
    penalised: Sequence[Penalised],
    ranks: Ranks,
) -> list[MicroBatch]:
    """Return the micro-batches with advantages; penalties are taken from rewards beforehand."""
    if spec.advantage == "batch":
        return _whiten_returns(spec, penalised, ranks)
    none = torch.empty(0, 3, dtype=torch.float64, device=ranks.device)
    rows = torch.cat([none, *(_rows(*each) for each in penalised if not each.batch.is_filler)])
    table, first = _gather(rows, ranks)
    found = _compute(spec, own_function, table.cpu())
    batches: list[MicroBatch] = []
    for batch, _ in penalised:
        own = found[first : first + batch.samples].to(batch.advantage)
        first += batch.samples
        batches.append(batch if batch.is_filler else replace(batch, advantage=own[batch.owner]))
    return batches


def _rows(batch: MicroBatch, penalty: Tensor | None) -> Tensor:
    """Return for each answer its reward, its group and its length."""
    rewards = batch.rewards
    lengths = batch.sum_by_answer(torch.ones_like(rewards[batch.owner]))
    if penalty is not None:
        rewards = rewards - batch.sum_by_answer(penalty.double())
    return torch.stack([rewards, batch.groups.double(), lengths], dim=1)


def _gather(rows: Tensor, ranks: Ranks) -> tuple[Tensor, int]:
    """Return the rows of all ranks, and where this rank's begin."""
    group = ranks.group
    if group is None:
        return rows, 0
    counts = torch.zeros(group.size(), dtype=torch.int64, device=ranks.device)
    counts[group.rank()] = len(rows)
    reduce_sum(counts, group)
    first = int(counts[: group.rank()].sum())
    table = rows.new_zeros(int(counts.sum()), rows.shape[1])
    table[first : first + len(rows)] = rows
    reduce_sum(table, group)
    return table, first


def _compute(spec: AlgorithmSpec, own_function: AdvantageFunction | None, table: Tensor) -> Tensor:
    rewards, groups, lengths = table[:, 0], table[:, 1].long(), table[:, 2].long()
    if own_function is not None:
        found = own_function(rewards, groups, lengths)
        if found.shape != rewards.shape:
            raise ConfigError(
                f"algorithm.advantage: {spec.advantage} returned a tensor of {tuple(found.shape)}, "
                f"and there are {len(rewards)} answers"
            )
        if not found.isfinite().all():
            raise ConfigError(
                f"algorithm.advantage: {spec.advantage} returned a number that isn't finite"
            )
        return found
    answers: dict[int, list[int]] = {}
    for index, number in enumerate(groups.tolist()):
        answers.setdefault(number, []).append(index)
    scored = [
        [Scored(rewards[i].item(), int(lengths[i])) for i in members]
        for members in answers.values()
    ]
    advantages = compute_advantages(scored, spec.advantage, spec.normalise_advantage)
    found = torch.zeros_like(rewards)
    for members, of_group in zip(answers.values(), advantages, strict=True):
        if of_group is not None:
            found[members] = found.new_tensor(of_group)
    return found


def _whiten_returns(
    spec: AlgorithmSpec, penalised: Sequence[Penalised], ranks: Ranks
) -> list[MicroBatch]:
    """Give the returns of all tokens a mean of 0 and a deviation of 1, as REINFORCE++ does.

    A token's return is its answer's reward less the penalties from this token on.
    """
    returns = [
        batch.rewards.new_empty(0)
        if batch.is_filler
        else batch.rewards[batch.owner] - (0.0 if penalty is None else _to_go(batch, penalty))
        for batch, penalty in penalised
    ]
    count, total = sum(map(len, returns)), sum(part.sum().item() for part in returns)
    sums = torch.tensor([count, total], dtype=torch.float64, device=ranks.device)
    reduce_sum(sums, ranks.group)
    count, mean = sums[0].item(), (sums[1] / sums[0].clamp(min=1.0)).item()
    squares = sum((part - mean).square().sum().item() for part in returns)
    square = torch.tensor(squares, dtype=torch.float64, device=ranks.device)
    reduce_sum(square, ranks.group)
    deviation = (square.item() / max(1.0, count - 1.0)) ** 0.5
    scale = 1.0 / (deviation + _EPSILON) if spec.normalise_advantage else 1.0
    return [
        batch
        if batch.is_filler
        else replace(batch, advantage=(scale * (part - mean)).to(batch.advantage))
        for (batch, _), part in zip(penalised, returns, strict=True)
    ]


def _to_go(batch: MicroBatch, values: Tensor) -> Tensor:
    """Return for each token the sum over it and the tokens after it in its answer."""
    exact = values.double()
    ends = batch.sum_by_answer(exact).cumsum(0)
    return ends[batch.owner] - exact.cumsum(0) + exact
