"""What a drafter learns from comes out of the native engine, with the states of its own passes.

Either the policy answers prompts, or it reads what was written before; no pass is made twice.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from tlt.engine.base import NoiseKey, Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.engine.native.gumbel_noise import GumbelNoise, key_word
from tlt.ids import Member, PromptIndex, Step
from tlt.trainer.drafter.accept_length import PolicyRollout
from tlt.trainer.drafter.samples import DrafterSample


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt and what somebody, perhaps the policy, answered."""

    id: int
    tokens: tuple[int, ...]
    prompt: int


def answered(
    engine: NativeEngine, requests: Iterable[Request]
) -> Iterator[tuple[Text, torch.Tensor]]:
    """With states, in the order in which the answers end."""
    asked = {request.id: request for request in requests}
    engine.submit(list(asked.values()))
    while engine.running:
        for done in engine.step():
            prompt = asked[done.id].prompt
            text = Text(id=done.id, tokens=(*prompt, *done.tokens), prompt=len(prompt))
            yield text, engine.hidden_states(done.id).clone()


def read(engine: NativeEngine, texts: Iterable[Text]) -> Iterator[tuple[Text, torch.Tensor]]:
    """With states, in the order in which the engine gets to their ends."""
    known = {text.id: text for text in texts}
    engine.submit([_reading(text) for text in known.values()])
    while engine.running:
        for done in engine.step():
            yield known[done.id], engine.hidden_states(done.id).clone()


def sample(text: Text, states: torch.Tensor) -> DrafterSample:
    return DrafterSample(tokens=text.tokens, prompt=text.prompt, states=states)


def rollout(text: Text, states: torch.Tensor, key: NoiseKey, vocabulary: int) -> PolicyRollout:
    """Of a text that the policy drew with this key, at temperature 1 and unfiltered."""
    word, noise = key_word(key), GumbelNoise(vocabulary, states.device)

    def gumbel(positions: torch.Tensor) -> torch.Tensor:
        return noise.gumbel(torch.full_like(positions, word), positions)

    return PolicyRollout(sample=sample(text, states), noise=gumbel)


def _reading(text: Text) -> Request:
    """The one token that is drawn after them all but the last is thrown away."""
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
