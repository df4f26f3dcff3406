"""Which answers a drafter learns from, and which are worth their memory: chosen, then copied.

Drafters earn their keep in the tail, and the answers that have finished while others still run are
the short ones. So long answers count for more than their tokens, and those of the step before, and
what still runs, make up for the long ones that are missing.

Answers to one prompt are so alike that a drafter which knows some guesses the others far better
than it will those to any other prompt. So what it is measured by are prompts it knows nothing of.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from tlt.ids import Member, PromptIndex, Step
from tlt.policies.keyed_random import mix

Origin = Literal["own", "others", "running", "previous"]

# one prompt in so many is held out; of a step with one prompt, one answer in so many
_HELD_OUT = 8
# and of a large step no more than it takes to measure
_MOST_HELD_OUT = 8
# the power of the length by which an answer counts for more
_TAIL = 0.5
# what an answer of the step before counts for
_OLD = 0.5
# each time that it was taken
_TAKEN = 0.5
# and however often that was, its turn comes
_OFTEN = 60


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, as far as choosing goes."""

    origin: Origin
    # of the answer, and of what is kept with it
    tokens: int
    bytes: int
    step: Step
    # how often it was learned from
    taken: int = 0


def held_out(step: Step, prompts: Sequence[PromptIndex]) -> tuple[PromptIndex, ...]:
    """Of a step's prompts those whose answers measure drafters; none is spared of a single one."""
    count = 0 if len(prompts) < 2 else min(max(1, len(prompts) // _HELD_OUT), _MOST_HELD_OUT)
    return tuple(sorted(prompts, key=lambda prompt: mix(step, prompt))[:count])


def is_held_out(
    prompts: Sequence[PromptIndex], step: Step, prompt: PromptIndex, member: Member
) -> bool:
    """`prompts`: what `held_out` said of the step."""
    return prompt in prompts if prompts else mix(step, prompt, member) % _HELD_OUT == 0


def weight(candidate: Candidate, step: Step) -> float:
    """By which it is drawn, token for token and beyond."""
    recent = 1.0 if candidate.step >= step else _OLD ** (step - candidate.step)
    return candidate.tokens ** (1.0 + _TAIL) * recent * _TAKEN ** min(candidate.taken, _OFTEN)


def least_worth(candidates: Sequence[Candidate], step: Step, most_bytes: int) -> list[int]:
    """Which to let go of, so that the rest fits."""
    total = sum(candidate.bytes for candidate in candidates)
    if total <= most_bytes:
        return []  # who decodes has no time to put them in order for nothing
    # for what they take, not for how long they are
    order = sorted(
        range(len(candidates)),
        key=lambda i: weight(candidates[i], step) / max(1, candidates[i].bytes),
    )
    gone: list[int] = []
    for index in order:
        if total <= most_bytes:
            break
        total -= candidates[index].bytes
        gone.append(index)
    return gone


def drawn(
    candidates: Sequence[Candidate], step: Step, most_tokens: int, randoms: Sequence[float]
) -> list[int]:
    """Some of them, none twice, of about so many tokens together; at least one if there is one.

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
        place = random * total
        picked = fitting[-1]
        for index in fitting:
            place -= weights[index]
            if place < 0.0:
                picked = index
                break
        chosen.append(picked)
        left.remove(picked)
        room -= candidates[picked].tokens
    return chosen
