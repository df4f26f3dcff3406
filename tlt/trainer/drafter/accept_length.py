"""What decoding would gain from a drafter, replayed on what the policy has written.

A chain is right until its first guess that isn't the sample's next token, so guesses that are fed
the sample's own tokens are accepted exactly as those of real decoding would be.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.interrupt import CheckInterrupt, never_interrupt
from tlt.models.eagle_drafter import Drafter
from tlt.trainer.drafter.interruptible_matmul import stretch, watched
from tlt.trainer.drafter.micro_batches import build_batch, split_into_windows
from tlt.trainer.drafter.samples import DrafterSample, EmbeddingAndHead
from tlt.trainer.drafter.unrolled_chains import unroll

# [positions] -> [positions, vocabulary]: what the policy's draw of these tokens was given
Noise = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyRollout:
    """A sample that the policy drew itself, at temperature 1."""

    sample: DrafterSample
    noise: Noise


@dataclass(frozen=True, kw_only=True)
class AcceptLengths:
    """Tokens gained a verify step, by depth of the chain, the bonus token included."""

    # guesses with the policy's noise, and the likeliest ones
    noise: dict[int, float]
    plain: dict[int, float]


@torch.no_grad()
def accept_lengths(
    drafter: Drafter,
    ends: EmbeddingAndHead,
    rollouts: Iterable[PolicyRollout],
    depths: Sequence[int],
    budget: int | None = None,
    check: CheckInterrupt = never_interrupt,
) -> AcceptLengths:
    """`budget`: rows at once, so that looks are not too far apart."""
    counted = {(kind, depth): [0, 0] for kind in range(2) for depth in depths}
    for rollout in rollouts:
        for kind, accepted in enumerate(
            _accepted(drafter, ends, rollout, max(depths), budget, check)
        ):
            for depth in depths:
                tokens, steps = _walk(rollout.sample, accepted, depth)
                counted[kind, depth][0] += tokens
                counted[kind, depth][1] += steps
    noise, plain = (
        {depth: counted[kind, depth][0] / counted[kind, depth][1] for depth in depths}
        for kind in range(2)
    )
    return AcceptLengths(noise=noise, plain=plain)


def _accepted(
    drafter: Drafter,
    ends: EmbeddingAndHead,
    rollout: PolicyRollout,
    depth: int,
    budget: int | None,
    check: CheckInterrupt,
) -> tuple[list[int], list[int]]:
    """By row of the answer: how many guesses of the chain that begins there are right."""
    sample, device = rollout.sample, ends.head.device
    tokens = torch.tensor(sample.tokens, device=device)
    # by kind, step and row
    right = torch.zeros(2, depth, sample.rows, dtype=torch.bool, device=device)
    for window in split_into_windows(0, sample.first, sample.rows, budget or sample.rows):
        one = build_batch([sample], [window], depth, device)
        rows = torch.arange(window.first, window.last, device=device)
        with watched(drafter, window.rows, check):
            for step, readout in enumerate(unroll(drafter, one, ends.embedding, None, check)):
                aims = rows + step + 2
                guesses = _guesses(drafter, ends, rollout.noise, readout, aims, check)
                wanted = tokens[aims.clamp(max=len(tokens) - 1)]
                right[:, step, rows] = (guesses == wanted) & (aims < len(tokens))
    first, second = right.int().cumprod(1).sum(1).tolist()
    return first, second


def _guesses(
    drafter: Drafter,
    ends: EmbeddingAndHead,
    noise: Noise,
    readout: Tensor,
    aims: Tensor,
    check: CheckInterrupt,
) -> Tensor:
    """[kinds, rows]: the tokens for these positions, with the noise there and without."""
    found: list[Tensor] = []
    # never the whole vocabulary for all rows at once
    most = max(1, stretch(ends.head) // ends.head.numel())
    for part, positions in zip(readout.split(most), aims.split(most), strict=True):
        check()
        logits = drafter.logits(part, ends.head)
        own = drafter.tokens(torch.arange(logits.shape[1], device=logits.device))
        noisy = logits + noise(positions)[:, own].to(logits)
        found.append(drafter.tokens(torch.stack([noisy, logits]).argmax(-1)))
    return torch.cat(found, dim=1)


def _walk(sample: DrafterSample, accepted: Sequence[int], depth: int) -> tuple[int, int]:
    """Tokens of the answer, and verify steps that give them: one begins where the last ended."""
    known, steps = max(2, sample.prompt), 0
    first = known
    while known < len(sample.tokens):
        known += min(accepted[known - 2], depth) + 1
        steps += 1
    return len(sample.tokens) - first, steps
