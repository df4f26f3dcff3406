"""Answers that a drafter may learn from: in bounded memory, what is long and recent first.

States that were captured while decoding are copied out of the engine only for answers that are
kept. What others wrote comes as tokens; the policy reads it when it is first drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import torch

from tlt.engine.base import NoiseKey
from tlt.ids import PromptIndex, Step
from tlt.policies.drafter.data_selection import (
    Candidate,
    Origin,
    choose_evictions,
    draw_answers,
    is_held_out,
)
from tlt.ranks.hidden_state_store import HiddenStateStore, Name
from tlt.trainer.drafter.samples import DrafterSample

_TOKEN_BYTES = 8
_SOME = 32
_CANARIES = 8


@dataclass
class Answer:
    key: NoiseKey
    tokens: tuple[int, ...]
    # how many of the tokens are the prompt's
    prompt: int
    candidate: Candidate
    states: torch.Tensor | None = None

    @property
    def name(self) -> Name:
        return self.key.step, self.key.prompt, self.key.member

    def sample(self) -> DrafterSample:
        assert self.states is not None
        return DrafterSample(tokens=self.tokens, prompt=self.prompt, states=self.states)


class ReplayBuffer:
    def __init__(self, shelf: HiddenStateStore, most_bytes: int) -> None:
        self._shelf = shelf
        self._most_bytes = most_bytes
        self._answers: dict[Name, Answer] = {}
        # the bytes of states of answers that are still being written here
        self._lent: dict[Name, int] = {}
        self._step = Step(0)
        self._held_out: Mapping[Step, tuple[PromptIndex, ...]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def bytes(self) -> int:
        return sum(answer.candidate.bytes for answer in self._answers.values())

    def begin(self, step: Step) -> None:
        """What is of an earlier step than the one before is forgotten."""
        if step == self._step:
            return
        self._step = step
        kept = [a for a in self._answers.values() if step - a.key.step <= 1]
        self._answers = {answer.name: answer for answer in kept if not _is_growing(answer)}
        for answer in self._answers.values():
            if answer.key.step < step:
                answer.candidate = _replaced(answer.candidate, origin="previous")
        self._lent.clear()
        self._shelf.keep_only(self._answers)
        self._shelf.forget_before(Step(step - 1))

    def hold_out(self, prompts: Mapping[Step, tuple[PromptIndex, ...]]) -> None:
        """Of this step, and of the one before."""
        self._held_out = prompts

    def add(
        self,
        origin: Origin,
        key: NoiseKey,
        prompt: Sequence[int],
        tokens: Sequence[int],
        states: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        """`states` are a view: copied here, if the answer is kept."""
        if key.purpose != "train" or key.step < self._step or len(tokens) < 2:
            return
        self.begin(key.step)
        whole = (*prompt, *tokens)
        name = (key.step, key.prompt, key.member)
        known = self._answers.get(name)
        if known is not None and not _is_growing(known):
            return
        candidate = Candidate(
            origin=origin,
            tokens=len(tokens),
            bytes=len(whole) * (self._shelf.token_bytes + _TOKEN_BYTES),
            step=key.step,
            taken=0 if known is None else known.candidate.taken,
        )
        self._lent.pop(name, None)
        answer = Answer(key=key, tokens=whole, prompt=len(prompt), candidate=candidate)
        self._answers[name] = answer
        self._make_room()
        if states is not None and name in self._answers:
            answer.states = self._shelf.put(name, states())

    def lend(self, key: NoiseKey, states: torch.Tensor) -> None:
        """What an answer has come to that is still being written here, for others to learn from.

        Of all that grow as many bytes at most as of those that are kept: others read the rest.
        """
        if key.step < self._step:
            return
        self.begin(key.step)
        name = (key.step, key.prompt, key.member)
        lent = sum(self._lent.values()) - self._lent.get(name, 0) + states.nbytes
        if lent <= self._most_bytes:
            self._lent[name] = states.nbytes
            self._shelf.put(name, states, growing=True)

    def fetch(self, answer: Answer) -> bool:
        """Whether its states are at hand, captured here or by somebody else on this host."""
        if answer.states is None:
            answer.states = self._shelf.take(answer.name, len(answer.tokens) - 1)
        return answer.states is not None

    def read(self, answer: Answer, states: torch.Tensor) -> None:
        """They had to be made."""
        growing = _is_growing(answer)
        answer.states = self._shelf.put(answer.name, states, growing=growing)

    def draw(self, most_tokens: int, randoms: Sequence[float]) -> list[Answer]:
        held = self._held()
        spared = {answer.name for answer in held if answer.key.step == self._step}
        spared |= {answer.name for answer in self._measuring(held)}
        micro_batches = [answer for name, answer in self._answers.items() if name not in spared]
        chosen = draw_answers(
            [a.candidate for a in micro_batches], self._step, most_tokens, randoms
        )
        found = [micro_batches[index] for index in chosen]
        for answer in found:
            answer.candidate = _replaced(answer.candidate, taken=answer.candidate.taken + 1)
        return found

    def known(self) -> list[Answer]:
        """Some whose states are here."""
        known = (answer for answer in self._answers.values() if answer.states is not None)
        return list(islice(known, _SOME))

    def canaries(self, most: int = _CANARIES) -> list[Answer]:
        """From short to long."""
        kept = self._measuring(self._held())
        # what was captured costs nothing to look at
        known = [answer for answer in kept if answer.states is not None]
        kept = sorted(known if len(known) >= most else kept, key=lambda a: len(a.tokens))
        if len(kept) <= most:
            return kept
        return [kept[(2 * i + 1) * len(kept) // (2 * most)] for i in range(most)]

    def _held(self) -> list[Answer]:
        prompts = self._held_out
        return [
            answer
            for (step, prompt, member), answer in self._answers.items()
            if is_held_out(prompts.get(step, ()), step, prompt, member)
        ]

    def _measuring(self, held: Sequence[Answer]) -> list[Answer]:
        """Of this step; while it has none that is whole, of the one before."""
        whole = [answer for answer in held if not _is_growing(answer)]
        return [answer for answer in whole if answer.key.step == self._step] or whole

    def _make_room(self) -> None:
        answers = list(self._answers.values())
        candidates = [answer.candidate for answer in answers]
        for index in choose_evictions(candidates, self._step, self._most_bytes):
            del self._answers[answers[index].name]
            self._shelf.remove(answers[index].name)


def _replaced(candidate: Candidate, **changes: object) -> Candidate:
    return msgspec.structs.replace(candidate, **changes)


def _is_growing(answer: Answer) -> bool:
    return answer.candidate.origin == "running"
