"""A prompt that goes on from an ended request is read from where that ended, to the same effect."""

import random
from pathlib import Path

import msgspec
import pytest
import torch

from tests.engine.reference import new_request, show
from tests.engine.test_hidden_states import LAYERS, near, states_of
from tlt.base.id_types import PolicyVersion
from tlt.engine.base import Sampling
from tlt.engine.native import NativeEngine
from tlt.engine.native.policy_forward import PrefillChunk
from tlt.models.decoder_from_folder import load_decoder

TURNS = 4


class Talk:
    """Conversations with an engine: each turn's prompt is all before it, and two new tokens."""

    def __init__(self, folder: Path, slots: int = 4, goes_on: bool = True, seed: int = 0) -> None:
        model = load_decoder(folder, torch.float64)
        cpu, version = torch.device("cpu"), PolicyVersion(0)
        self.engine = engine = NativeEngine(model, show, slots, 128, cpu, version, LAYERS)
        self.read = 0
        self._goes_on = goes_on
        self._random = random.Random(seed)
        self._forward = engine._forward.prefill  # pyright: ignore[reportPrivateUsage]
        engine._forward.prefill = self._count  # type: ignore[method-assign]
        self.tokens: dict[int, list[int]] = {}
        self.turns: dict[int, int] = {}

    def _count(self, chunks: list[PrefillChunk]) -> None:
        self.read += sum(len(chunk.tokens) for chunk in chunks)
        self._forward(chunks)

    def hold(self, conversations: int) -> None:
        """Hold them at once; how long each waits between two turns is random."""
        for index in range(conversations):
            self.tokens[index], self.turns[index] = [3 + index, 5, 7], 0
        waiting = list(self.tokens)
        while waiting or self.engine.running:
            while waiting and (not self.engine.running or self._random.random() < 0.3):
                index = waiting.pop(self._random.randrange(len(waiting)))
                turn = self.turns[index]
                self.submit(100 * turn + index, self.tokens[index], 4 + 3 * (index % 3))
            for done in self.engine.step():
                index = done.id % 100
                self.tokens[index] += [*done.tokens, 11, 13]
                self.turns[index] += 1
                if self.turns[index] < TURNS:
                    waiting.append(index)

    def submit(self, id_: int, prompt: list[int], most: int = 6) -> None:
        made = new_request(id_, prompt, Sampling(), most, member=id_ % 100)
        self.engine.submit([msgspec.structs.replace(made, goes_on=self._goes_on)])

    def ended(self) -> list[int]:
        """Return the tokens of the request that runs."""
        while not (done := self.engine.step()):
            pass
        return done[0].tokens


@pytest.mark.parametrize(("slots", "conversations"), [(8, 3), (4, 6), (1, 3)])
def test_turns_are_the_same_and_only_new_tokens_are_read(
    folder: Path, slots: int, conversations: int
) -> None:
    again, kept = (Talk(folder, slots, goes_on) for goes_on in (False, True))
    again.hold(conversations)
    kept.hold(conversations)
    assert kept.tokens == again.tokens
    if slots > conversations:
        # of each turn, what the engine hasn't written itself: its last token, and what followed
        assert kept.read == conversations * (2 + (TURNS - 1) * 2)
    assert kept.read <= again.read


def test_hidden_states_are_those_of_the_whole_prompt(folder: Path) -> None:
    talk = Talk(folder)
    talk.submit(0, [3, 5, 7])
    first = talk.ended()
    # states are kept, dropped, and kept again: those of the first turn have a gap
    for keeps in (True, False, True):
        talk.engine.set_capturing(keeps)
    prompt = [3, 5, 7, *first, 11, 13]
    talk.submit(100, prompt)
    second = talk.ended()
    states = talk.engine.hidden_states(100)
    assert near(states, states_of(folder, [*prompt, *second][: len(states)]))


def test_new_weights_read_all_again(folder: Path, next_folder: Path) -> None:
    expected = Talk(next_folder)
    talk = Talk(folder)
    talk.submit(0, [3, 5, 7])
    prompt = [3, 5, 7, *talk.ended(), 11, 13]
    talk.engine.swap_weights(PolicyVersion(1), load_decoder(next_folder, torch.float64).weights)
    found: list[list[int]] = []
    for each in (expected, talk):
        each.submit(100, prompt)
        found.append(each.ended())
    assert found[0] == found[1]
