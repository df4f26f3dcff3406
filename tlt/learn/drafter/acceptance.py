"""What decoding would gain from a drafter, replayed on what the policy has written.

A chain is right until its first guess that isn't the sample's next token, so guesses that are fed
the sample's own tokens are accepted exactly as those of real decoding would be.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.learn.drafter.batching import Window, batch
from tlt.learn.drafter.sample import DraftSample, PolicyEnds
from tlt.learn.drafter.unrolling import unrolled
from tlt.models.drafter import Drafter

# [positions] -> [positions, vocabulary]: what the policy's draw of these tokens was given
Noise = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """A sample that the policy drew itself, at temperature 1."""

    sample: DraftSample
    noise: Noise


@dataclass(frozen=True, kw_only=True)
class AcceptLengths:
    """Tokens gained a verify step, by depth of the chain, the bonus token included."""

    # guesses with the policy's noise, and the likeliest ones
    noise: dict[int, float]
    plain: dict[int, float]


@torch.no_grad()
def accept_lengths(
    drafter: Drafter, ends: PolicyEnds, rollouts: Iterable[Rollout], depths: Sequence[int]
) -> AcceptLengths:
    counted = {(kind, depth): [0, 0] for kind in range(2) for depth in depths}
    for rollout in rollouts:
        for kind, accepted in enumerate(_accepted(drafter, ends, rollout, max(depths))):
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
    drafter: Drafter, ends: PolicyEnds, rollout: Rollout, depth: int
) -> tuple[list[int], list[int]]:
    """By row: how many guesses of the chain that begins there are right."""
    sample, device = rollout.sample, ends.head.device
    whole = batch([sample], [Window(sample=0, first=0, last=sample.rows)], depth, device)
    tokens = torch.tensor(sample.tokens, device=device)
    right: tuple[list[Tensor], list[Tensor]] = ([], [])
    rows = torch.arange(sample.rows, device=device)
    noise = rollout.noise(torch.arange(2, len(tokens), device=device))
    for step, readout in enumerate(unrolled(drafter, whole, ends.embedding, None)):
        guessed = (rows + step).clamp(max=sample.rows - 1)
        wanted = tokens[guessed + 2]
        known = rows + step < sample.rows
        logits = drafter.logits(readout, ends.head)
        own = drafter.tokens(torch.arange(logits.shape[1], device=device))
        noisy = logits + noise[guessed][:, own].to(logits)
        for kind, scores in enumerate((noisy, logits)):
            right[kind].append((drafter.tokens(scores.argmax(-1)) == wanted) & known)
    first, second = (torch.stack(kind).int().cumprod(0).sum(0).tolist() for kind in right)
    return first, second


def _walk(sample: DraftSample, accepted: Sequence[int], depth: int) -> tuple[int, int]:
    """Tokens of the answer, and verify steps that give them: one begins where the last ended."""
    known, steps = max(2, sample.prompt), 0
    first = known
    while known < len(sample.tokens):
        known += min(accepted[known - 2], depth) + 1
        steps += 1
    return len(sample.tokens) - first, steps
