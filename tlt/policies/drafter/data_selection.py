"""Choose the answers that a drafter trains on, and those worth their memory.

Drafters pay off in the tail, and the answers that have finished while others still run are the
short ones. So long answers weigh more than their tokens alone, and answers of earlier steps and
unfinished ones stand in for the long ones that are missing. A drafter that reads the few answers of
two steps again and again learns them by heart, so answers are kept as long as memory allows.

Answers to one prompt are so alike that a drafter trained on some proposes far better for the others
than for those to any other prompt. So it is evaluated on prompts whose answers it never trains on.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from tlt.base.id_types import Member, PromptIndex, Step
from tlt.policies.keyed_random import mix

Origin = Literal["own", "others", "unfinished", "earlier"]

# one of this many prompts is held out; in a step with one prompt, one of this many answers
_HELD_OUT = 8
# limit of held-out prompts, which suffices for steps of any size
_MOST_HELD_OUT = 8
# power of the length by which an answer weighs more
_TAIL = 0.5
# factor for each step that an answer is older
_OLD = 0.85
# factor for each draw of an answer, and the number of draws after which it stays the same
_TAKEN = 0.5
_MOST_TAKEN = 60


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of an answer that decide how likely it is drawn."""

    origin: Origin
    tokens: int
    # memory of the answer and its hidden states
    bytes: int
    step: Step
    # number of times that it was drawn
    taken: int = 0


def choose_held_out(step: Step, prompts: Sequence[PromptIndex]) -> tuple[PromptIndex, ...]:
    """Return the prompts whose answers evaluate drafters; none if the step has a single prompt."""
    count = 0 if len(prompts) < 2 else min(max(1, len(prompts) // _HELD_OUT), _MOST_HELD_OUT)
    return tuple(sorted(prompts, key=lambda prompt: mix(step, prompt))[:count])


def is_held_out(
    held_out: Sequence[PromptIndex], step: Step, prompt: PromptIndex, member: Member
) -> bool:
    """Return True for answers to held-out prompts or, without such prompts, for one in eight."""
    return prompt in held_out if held_out else mix(step, prompt, member) % _HELD_OUT == 0


def weight(candidate: Candidate, step: Step) -> float:
    recent = 1.0 if candidate.step >= step else _OLD ** (step - candidate.step)
    taken = _TAKEN ** min(candidate.taken, _MOST_TAKEN)
    return candidate.tokens ** (1.0 + _TAIL) * recent * taken


def choose_evictions(candidates: Sequence[Candidate], step: Step, most_bytes: int) -> list[int]:
    """Return indices of the answers with the least weight for their memory: the others fit."""
    total = sum(candidate.bytes for candidate in candidates)
    if total <= most_bytes:
        return []  # skips the sort in ranks that decode
    order = sorted(
        range(len(candidates)),
        key=lambda i: weight(candidates[i], step) / max(1, candidates[i].bytes),
    )
    evicted: list[int] = []
    for index in order:
        if total <= most_bytes:
            break
        total -= candidates[index].bytes
        evicted.append(index)
    return evicted


def draw_answers(
    candidates: Sequence[Candidate], step: Step, most_tokens: int, randoms: Sequence[float]
) -> list[int]:
    """Draw at least one answer by weight, none twice, up to about `most_tokens` together.

    `randoms`: uniform in [0, 1), one for each draw that may be needed.
    """
    left = list(range(len(candidates)))
    weights = [weight(candidate, step) for candidate in candidates]
    chosen: list[int] = []
    room = most_tokens
    for random in randoms:
        fitting = [index for index in left if not chosen or candidates[index].tokens <= room]
        total = sum(weights[index] for index in fitting)
        if not fitting or total <= 0.0:
            break
        point = random * total
        picked = fitting[-1]
        for index in fitting:
            point -= weights[index]
            if point < 0.0:
                picked = index
                break
        chosen.append(picked)
        left.remove(picked)
        room -= candidates[picked].tokens
    return chosen
