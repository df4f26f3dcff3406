"""The replay counts the same tokens as decoding step by step."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.trainer.drafters import HIDDEN, LAYOUTS, VOCABULARY, drafter, ends
from tlt.models.eagle_drafter import Drafter
from tlt.trainer.drafter.accept_length import PolicyRollout, accept_lengths
from tlt.trainer.drafter.samples import DrafterSample


def noise(positions: Tensor, tokens: Tensor | None = None) -> Tensor:
    table = torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(9))
    return 3 * table[positions]


def written_with(made: Drafter, layout: str, share: float, seed: int) -> PolicyRollout:
    """Make a rollout with random states, most of whose tokens the drafter proposes with noise."""
    generator = torch.Generator().manual_seed(seed)
    kept = 1 if layout == "eagle" else 4
    states = torch.randn(30, kept, HIDDEN, generator=generator, dtype=torch.float64)
    tokens: list[int] = [1, 2]
    while len(tokens) < 31:
        (guess,) = guesses(made, tokens, states, 1, True)
        chance = torch.rand((), generator=generator)
        tokens.append(guess if chance < share else int(chance * 1000) % VOCABULARY)
    return PolicyRollout(sample=DrafterSample(tokens=tokens, prompt=2, states=states), noise=noise)


@torch.no_grad()
def guesses(made: Drafter, tokens: list[int], states: Tensor, depth: int, noisy: bool) -> list[int]:
    """Return proposals as an engine makes them, each from the one before."""
    features = made.feature(states[: len(tokens) - 1, : len(made.config.captured)])
    cached: list[tuple[Tensor, Tensor]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cached.append((k, v))
        keys, values = (torch.cat(parts, dim=-2)[None] for parts in zip(*cached, strict=True))
        return F.scaled_dot_product_attention(
            q[None], keys, values, is_causal=len(cached) == 1, enable_gqa=True
        )[0]

    fresh, first, chain = torch.tensor(tokens[1:]), 0, list[int]()
    for step in range(depth):
        positions = torch.arange(first, first + len(fresh))
        guess = made(F.embedding(fresh, ends().embedding), features, positions, attend)
        logits = made.logits(guess.readout[-1], ends().head)
        if noisy:
            logits = logits + noise(torch.tensor(len(tokens) + step))
        chain.append(int(logits.argmax()))
        first += len(fresh)
        fresh, features = torch.tensor(chain[-1:]), guess.feature[-1:]
    return chain


def decoded(made: Drafter, rollout: PolicyRollout, depth: int, noisy: bool) -> tuple[int, int]:
    sample = rollout.sample
    known, steps = sample.prompt, 0
    while known < len(sample.tokens):
        chain = guesses(made, list(sample.tokens[:known]), sample.states, depth, noisy)
        steps += 1
        for guess in chain:
            if known == len(sample.tokens) or guess != sample.tokens[known]:
                break
            known += 1
        known += 1
    return len(sample.tokens) - sample.prompt, steps


@pytest.mark.parametrize("budget", [None, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_accept_lengths_equal_those_of_step_by_step_decoding(layout: str, budget: int | None):
    made = drafter(layout)
    rollouts = [written_with(made, layout, 0.8, seed) for seed in range(3)]
    found = accept_lengths(made, ends(), rollouts, (2, 4), budget)
    for noisy, lengths in ((True, found.noise), (False, found.plain)):
        for depth in (2, 4):
            counts = [decoded(made, rollout, depth, noisy) for rollout in rollouts]
            tokens, steps = (sum(column) for column in zip(*counts, strict=True))
            assert lengths[depth] == tokens / steps
    assert found.noise[4] > found.noise[2] > 1.5
    assert found.noise[4] > found.plain[4]


def test_perfect_drafter_gains_its_depth_plus_the_bonus_token():
    made = drafter("eagle")
    rollout = written_with(made, "eagle", 1.0, 0)
    found = accept_lengths(made, ends(), [rollout], (1,))
    # 29 tokens, two at a time
    assert found.noise[1] == 29 / 15
