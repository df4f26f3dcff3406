"""Compute the accept length that a drafter would reach, by replaying answers of the policy.

Chains are fed the answer's own tokens. A chain counts only up to its first wrong guess, so its
accepted guesses are exactly those that decoding would accept.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.base.interrupt_check import CheckInterrupt, never_interrupt
from tlt.models.eagle_drafter import Drafter
from tlt.models.float32_product import multiply_wide
from tlt.trainer.drafter.interruptible_matmul import check_layers, work_per_check
from tlt.trainer.drafter.micro_batches import build_batch, split_into_windows
from tlt.trainer.drafter.samples import DrafterSample, EmbeddingAndHead
from tlt.trainer.drafter.unrolled_chains import unroll

# positions, and the tokens that matter (None: all) -> [positions, tokens]: the Gumbel noise with
# which the policy drew
Noise = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyRollout:
    """A sample that the policy drew itself, at temperature 1."""

    sample: DrafterSample
    noise: Noise


@dataclass(frozen=True, kw_only=True)
class AcceptLengths:
    """Accept length by depth of the chain."""

    # guesses are drawn with the policy's noise
    noise: dict[int, float]
    # guesses are the likeliest tokens
    plain: dict[int, float]


@torch.no_grad()
def accept_lengths(
    drafter: Drafter,
    embedding_and_head: EmbeddingAndHead,
    rollouts: Iterable[PolicyRollout],
    depths: Sequence[int],
    budget: int | None = None,
    check: CheckInterrupt = never_interrupt,
) -> AcceptLengths:
    """Replay the rollouts, at most `budget` rows at once so that checks stay close together."""
    counts = {(kind, depth): [0, 0] for kind in range(2) for depth in depths}
    for rollout in rollouts:
        for kind, accepted in enumerate(
            _accepted_guesses(drafter, embedding_and_head, rollout, max(depths), budget, check)
        ):
            for depth in depths:
                tokens, steps = _count_verify_steps(rollout.sample, accepted, depth)
                counts[kind, depth][0] += tokens
                counts[kind, depth][1] += steps
    noise, plain = (
        {depth: counts[kind, depth][0] / counts[kind, depth][1] for depth in depths}
        for kind in range(2)
    )
    return AcceptLengths(noise=noise, plain=plain)


def _accepted_guesses(
    drafter: Drafter,
    embedding_and_head: EmbeddingAndHead,
    rollout: PolicyRollout,
    depth: int,
    budget: int | None,
    check: CheckInterrupt,
) -> tuple[list[int], list[int]]:
    """Count the right guesses of the chain that begins at each row: with noise, then without."""
    sample, device = rollout.sample, embedding_and_head.head.device
    tokens = torch.tensor(sample.tokens, device=device)
    # by kind of guess, step and row
    right = torch.zeros(2, depth, sample.rows, dtype=torch.bool, device=device)
    for window in split_into_windows(0, sample.first, sample.rows, budget or sample.rows):
        batch = build_batch([sample], [window], depth, device)
        rows = torch.arange(window.first, window.last, device=device)
        with check_layers(drafter, window.rows, check):
            for step, readout in enumerate(
                unroll(drafter, batch, embedding_and_head.embedding, None, check)
            ):
                targets = rows + step + 2
                guesses = _guess_tokens(
                    drafter, embedding_and_head, rollout.noise, readout, targets, check
                )
                expected = tokens[targets.clamp(max=len(tokens) - 1)]
                right[:, step, rows] = (guesses == expected) & (targets < len(tokens))
    with_noise, without = right.int().cumprod(1).sum(1).tolist()
    return with_noise, without


def _guess_tokens(
    drafter: Drafter,
    embedding_and_head: EmbeddingAndHead,
    noise: Noise,
    readout: Tensor,
    positions: Tensor,
    check: CheckInterrupt,
) -> Tensor:
    """Return the guesses for these positions, [with noise and without, rows]."""
    parts: list[Tensor] = []
    # a token that the drafter cannot propose is never guessed, so it counts as a rejection
    head, tokens = drafter.head(embedding_and_head.head), drafter.tokens
    # rows whose logits take no longer than the time between two checks
    most = max(1, work_per_check(head) // head.numel())
    for part, at in zip(readout.split(most), positions.split(most), strict=True):
        check()
        logits = multiply_wide(part, head)
        noisy = logits + noise(at, tokens).to(logits)
        parts.append(drafter.token_ids(torch.stack([noisy, logits]).argmax(-1)))
    return torch.cat(parts, dim=1)


def _count_verify_steps(
    sample: DrafterSample, accepted: Sequence[int], depth: int
) -> tuple[int, int]:
    """Return how many tokens of the answer are decoded, and in how many verify steps."""
    first = decoded = max(2, sample.prompt)
    steps = 0
    while decoded < len(sample.tokens):
        decoded += min(accepted[decoded - 2], depth) + 1
        steps += 1
    return len(sample.tokens) - first, steps
