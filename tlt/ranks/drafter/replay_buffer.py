"""Keep answers that a drafter may learn from: long and recent ones first, in bounded memory.

Hidden states that were captured while decoding are copied out of the engine only for answers that
are kept. Other ranks' answers come as tokens; a prefill makes their states when they are first
drawn.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import torch

from tlt.base.id_types import PromptIndex, Step
from tlt.engine.base import NoiseKey
from tlt.policies.drafter.data_selection import (
    Candidate,
    Origin,
    choose_evictions,
    draw_answers,
    is_held_out,
)
from tlt.ranks.drafter.shared_hidden_states import HiddenStateStore, Name
from tlt.trainer.drafter.samples import DrafterSample

_TOKEN_BYTES = 8
_SAMPLED_ANSWERS = 32
# steps for which answers are kept at most; their memory is the closer limit for large policies
_MOST_STEPS = 16
_EVALUATION_ANSWERS = 8


@dataclass
class Answer:
    """A prompt with its answer, whole or so far, and the policy's hidden states."""

    key: NoiseKey
    tokens: tuple[int, ...]
    # number of the prompt's tokens
    prompt: int
    candidate: Candidate
    states: torch.Tensor | None = None

    @property
    def name(self) -> Name:
        """Return the key that identifies the answer in a job."""
        return self.key.step, self.key.prompt, self.key.member

    def sample(self) -> DrafterSample:
        """Return the answer as a sample to learn from."""
        assert self.states is not None
        return DrafterSample(tokens=self.tokens, prompt=self.prompt, states=self.states)


class ReplayBuffer:
    """The answers of recent steps that a drafter may learn from."""

    def __init__(self, states: HiddenStateStore, most_bytes: int, ahead: int = 0) -> None:
        """Expect answers of up to `ahead` steps after the one at hand."""
        self._states = states
        self._most_bytes = most_bytes
        self._ahead = ahead
        self._answers: dict[Name, Answer] = {}
        # of the answers and their states
        self._bytes = 0
        # bytes of shared states, by answer that is still being written here
        self._partial_bytes: dict[Name, int] = {}
        self._step = Step(0)
        self._held_out: Mapping[Step, tuple[PromptIndex, ...]] = {}

    @property
    def bytes(self) -> int:
        """Return the memory that the answers and their states take."""
        return self._bytes

    def begin(self, step: Step) -> None:
        """Begin a step: forget unfinished answers, and those of steps long ago."""
        if step <= self._step:
            return
        self._step = step
        kept = [a for a in self._answers.values() if step - a.key.step <= _MOST_STEPS]
        self._answers = {answer.name: answer for answer in kept if not _is_partial(answer)}
        self._bytes = sum(answer.candidate.bytes for answer in self._answers.values())
        for answer in self._answers.values():
            if answer.key.step < step and answer.candidate.origin != "earlier":
                answer.candidate = _replaced(answer.candidate, origin="earlier")
        self._partial_bytes.clear()
        self._states.keep_only(self._answers)
        self._states.forget_before(Step(step - _MOST_STEPS))

    def hold_out(self, prompts: Mapping[Step, tuple[PromptIndex, ...]]) -> None:
        """Keep answers to these prompts, by step, for evaluations."""
        self._held_out = prompts

    def add(
        self,
        origin: Origin,
        key: NoiseKey,
        prompt: Sequence[int],
        tokens: Sequence[int],
        states: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        """Keep an answer if it is worth its memory; `states` returns a view, which is copied."""
        if key.purpose != "train" or key.step < self._step or len(tokens) < 2:
            return
        self.begin(Step(key.step - self._ahead))
        whole = (*prompt, *tokens)
        name = (key.step, key.prompt, key.member)
        known = self._answers.get(name)
        if known is not None and not _is_partial(known):
            return
        candidate = Candidate(
            origin=origin,
            tokens=len(tokens),
            bytes=len(whole) * (self._states.token_bytes + _TOKEN_BYTES),
            step=key.step,
            taken=0 if known is None else known.candidate.taken,
        )
        self._partial_bytes.pop(name, None)
        answer = Answer(key=key, tokens=whole, prompt=len(prompt), candidate=candidate)
        self._answers[name] = answer
        self._bytes += candidate.bytes - (0 if known is None else known.candidate.bytes)
        if self._bytes > self._most_bytes:
            self._make_room()
        if states is not None and name in self._answers:
            answer.states = self._states.put(name, states())

    def share_partial(self, key: NoiseKey, states: torch.Tensor) -> None:
        """Share the states of an answer that is still being written, in bounded memory.

        Other ranks make the states that don't fit by a prefill.
        """
        if key.step < self._step:
            return
        self.begin(Step(key.step - self._ahead))
        name = (key.step, key.prompt, key.member)
        others = sum(self._partial_bytes.values()) - self._partial_bytes.get(name, 0)
        if others + states.nbytes <= self._most_bytes:
            self._partial_bytes[name] = states.nbytes
            self._states.put(name, states, partial=True)

    def fetch(self, answer: Answer) -> bool:
        """Load the answer's states from this host; return False if no rank here captured them."""
        if answer.states is None:
            answer.states = self._states.take(answer.name, len(answer.tokens) - 1)
        return answer.states is not None

    def put_states(self, answer: Answer, states: torch.Tensor) -> None:
        """Keep and share states that a prefill has made."""
        partial = _is_partial(answer)
        answer.states = self._states.put(answer.name, states, partial=partial)

    def draw(self, most_tokens: int, randoms: Sequence[float]) -> list[Answer]:
        """Draw answers of about `most_tokens` tokens, but none that evaluations need."""
        held = _held_out_answers(self._answers.values(), self._held_out, self._step)
        untrainable = {answer.name for answer in held if answer.key.step >= self._step}
        untrainable |= {answer.name for answer in _evaluated(held, self._step)}
        trainable = [answer for name, answer in self._answers.items() if name not in untrainable]
        chosen = draw_answers([a.candidate for a in trainable], self._step, most_tokens, randoms)
        found = [trainable[index] for index in chosen]
        for answer in found:
            answer.candidate = _replaced(answer.candidate, taken=answer.candidate.taken + 1)
        return found

    def some_with_states(self) -> list[Answer]:
        """Return a few answers that have states."""
        known = (answer for answer in self._answers.values() if answer.states is not None)
        return list(islice(known, _SAMPLED_ANSWERS))

    def evaluation_answers(self, most: int = _EVALUATION_ANSWERS) -> list[Answer]:
        """Return held-out answers of all lengths, from short to long."""
        held = _held_out_answers(self._answers.values(), self._held_out, self._step)
        kept = _evaluated(held, self._step)
        # answers that have states need no prefill
        known = [answer for answer in kept if answer.states is not None]
        kept = sorted(known if len(known) >= most else kept, key=lambda a: len(a.tokens))
        if len(kept) <= most:
            return kept
        return [kept[(2 * i + 1) * len(kept) // (2 * most)] for i in range(most)]

    def _make_room(self) -> None:
        answers = list(self._answers.values())
        candidates = [answer.candidate for answer in answers]
        for index in choose_evictions(candidates, self._step, self._most_bytes):
            removed = self._answers.pop(answers[index].name)
            self._bytes -= removed.candidate.bytes
            self._states.remove(removed.name)


def _replaced(candidate: Candidate, **changes: object) -> Candidate:
    return msgspec.structs.replace(candidate, **changes)


def _is_partial(answer: Answer) -> bool:
    return answer.candidate.origin == "unfinished"


def _held_out_answers(
    answers: Iterable[Answer], prompts: Mapping[Step, tuple[PromptIndex, ...]], step: Step
) -> list[Answer]:
    """Return the held-out answers of this step and of the one before; older ones train."""
    recent = (answer for answer in answers if answer.key.step >= step - 1)
    return [a for a in recent if is_held_out(prompts.get(a.key.step, ()), *a.name)]


def _evaluated(held_out: Sequence[Answer], step: Step) -> list[Answer]:
    """Return the whole answers of this step, or of the one before while this step has none."""
    whole = [answer for answer in held_out if not _is_partial(answer)]
    return [answer for answer in whole if answer.key.step == step] or whole
