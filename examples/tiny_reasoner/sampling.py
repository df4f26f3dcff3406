"""Invariant: a sample is drawn at temperature 1 from fp32 logits, and a seed fixes all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from examples.tiny_reasoner.network import KeyValues, Network
from examples.tiny_reasoner.task import Problem, prompt_text, reward, right_answer
from examples.tiny_reasoner.vocabulary import BOS, EOS, MAX_POSITIONS, decode, encode

ROWS = 128
KEPT_SHARE = 0.75


@dataclass(frozen=True)
class Figures:
    """Accuracy and completion lengths on held-out problems."""

    accuracy: float
    length_p50: int
    length_p90: int
    length_max: int


def measure(network: Network, problems: Sequence[Problem], seed: int = 0) -> Figures:
    """Sample and score one completion for each problem."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [[BOS, *encode(prompt_text(problem))] for problem in problems]
    completions: list[list[int]] = []
    for start in range(0, len(prompts), ROWS):
        completions += sample(network, prompts[start : start + ROWS], generator)
    rewards = [
        reward(decode(completion), right_answer(problem))
        for completion, problem in zip(completions, problems, strict=True)
    ]
    lengths = sorted(map(len, completions))
    return Figures(
        accuracy=sum(rewards) / len(rewards),
        length_p50=lengths[len(lengths) // 2],
        length_p90=lengths[len(lengths) * 9 // 10],
        length_max=lengths[-1],
    )


@torch.inference_mode()
def sample(
    network: Network, prompts: list[list[int]], generator: torch.Generator
) -> list[list[int]]:
    """Return a completion for each prompt, <eos> included.

    All rows are at the same position: longer prompts are still read while shorter ones are
    answered, so nothing is padded.
    """
    texts = [list(prompt) for prompt in prompts]
    running = list(range(len(texts)))
    ended: set[int] = set()
    cache = KeyValues(network.shape, len(texts), MAX_POSITIONS)
    for position in range(MAX_POSITIONS - 1):
        ids = torch.tensor([[texts[row][position]] for row in running])
        weights = network(ids, cache)[:, -1].softmax(-1)
        drawn: list[int] = torch.multinomial(weights, 1, generator=generator).flatten().tolist()
        for row, token in zip(running, drawn, strict=True):
            if len(texts[row]) == position + 1:
                texts[row].append(token)
                if token == EOS:
                    ended.add(row)
        alive = [i for i, row in enumerate(running) if row not in ended]
        if not alive:
            break
        # Finished rows go on, ignored, until dropping them is worth copying the cache.
        if len(alive) <= KEPT_SHARE * len(running):
            cache.keep(torch.tensor(alive))
            running = [running[i] for i in alive]
    return [_first_answer(text[len(prompt) :]) for text, prompt in zip(texts, prompts, strict=True)]


def _first_answer(ids: list[int]) -> list[int]:
    return ids[: ids.index(EOS) + 1] if EOS in ids else ids
