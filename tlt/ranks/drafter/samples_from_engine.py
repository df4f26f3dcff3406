"""Make training samples for a drafter from texts and the native engine's hidden states.

The policy either answers prompts or reads existing texts; no pass is made twice.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch

from tlt.base.id_types import Member, PromptIndex, Step
from tlt.engine.base import Engine, NoiseKey, Request, Sampling
from tlt.engine.native.gumbel_noise import GumbelNoise, key_word
from tlt.trainer.drafter.accept_length import PolicyRollout
from tlt.trainer.drafter.samples import DrafterSample


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt and an answer, which the policy or another source wrote."""

    id: int
    tokens: tuple[int, ...]
    # number of the prompt's tokens
    prompt: int


def answered(engine: Engine, requests: Iterable[Request]) -> Iterator[tuple[Text, torch.Tensor]]:
    """Answer prompts; yield texts with states, in the order in which the answers end."""
    by_id = {request.id: request for request in requests}
    engine.submit(list(by_id.values()))
    while engine.running:
        for done in engine.step():
            prompt = by_id[done.id].prompt
            text = Text(id=done.id, tokens=(*prompt, *done.tokens), prompt=len(prompt))
            yield text, engine.hidden_states(done.id).clone()


def read(engine: Engine, texts: Iterable[Text]) -> Iterator[tuple[Text, torch.Tensor]]:
    """Read texts; yield them with states, in the order in which the engine finishes them."""
    by_id = {text.id: text for text in texts}
    engine.submit([_reading(text) for text in by_id.values()])
    while engine.running:
        for done in engine.step():
            yield by_id[done.id], engine.hidden_states(done.id).clone()


def sample(text: Text, states: torch.Tensor) -> DrafterSample:
    """Return a text as a sample to learn from."""
    return DrafterSample(tokens=text.tokens, prompt=text.prompt, states=states)


def rollout(text: Text, states: torch.Tensor, key: NoiseKey, vocabulary: int) -> PolicyRollout:
    """Return a text that the policy drew with this key, at temperature 1 and unfiltered."""
    word = key_word(key)

    @cache
    def noise_on(device: torch.device) -> GumbelNoise:
        return GumbelNoise(vocabulary, device)

    def gumbel(positions: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
        # states are kept on the host, and drafters are evaluated on the rank's device
        words = torch.full_like(positions, word)
        return noise_on(positions.device).gumbel(words, positions, tokens)

    return PolicyRollout(sample=sample(text, states), noise=gumbel)


def _reading(text: Text) -> Request:
    """Return a request that prefills all tokens but the last; the token it draws is ignored."""
    key = NoiseKey(
        seed=0, step=Step(0), purpose="train", prompt=PromptIndex(0), member=Member(text.id)
    )
    return Request(
        id=text.id,
        prompt=text.tokens[:-1],
        key=key,
        sampling=Sampling(temperature=0.0),
        max_new_tokens=1,
        stop_tokens=frozenset(),
    )
