"""Put the groups with the longest answers off to a step of their own (`rollout.defer_long`).

A step issues more groups than it needs, and ends with enough complete ones. The prompts of the
others are put off. Once these are enough for a step, they are the next one, which waits for all of
its answers. Every answer is a new one of the step's own weights, so tokens of groups that are put
off are lost. The last steps issue what was put off, so that none of it is left.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from tlt.base.id_types import PromptIndex
from tlt.policies.run.run_state import RunState, Turn
from tlt.protocol.refs import PromptCursor
from tlt.spec.config import JobSpec


class Intake(NamedTuple):
    """The prompts of a step."""

    # put off by earlier steps
    again: tuple[PromptIndex, ...]
    # how many new ones
    new: int
    # True if the step ends before all of its groups are complete
    ends_early: bool


def plan_intake(state: RunState, cursor: PromptCursor) -> Intake:
    algorithm, rollout = state.spec.algorithm, state.spec.rollout
    needed, waiting = algorithm.prompts_per_step, cursor.deferred
    if rollout.defer_long and len(waiting) < needed:
        surplus = rollout.surplus(needed)
        if len(waiting) + surplus <= (algorithm.steps - state.step - 1) * needed:
            return Intake((), needed + surplus, ends_early=True)
    again = waiting[:needed]
    return Intake(again, needed - len(again), ends_early=rollout.partial > 0)


def take_over(spec: JobSpec, cursor: PromptCursor, prompts: int) -> PromptCursor:
    """Return another job's cursor, with what can wait in this one.

    Its prompts may be fewer, and each step has to find enough that don't wait.
    """
    size = spec.algorithm.prompts_per_step
    room = max(0, prompts - size - spec.rollout.surplus(size))
    there = tuple(prompt for prompt in cursor.deferred if prompt < prompts)
    return msgspec.structs.replace(cursor, deferred=there[:room])


def begin(cursor: PromptCursor, again: tuple[PromptIndex, ...]) -> PromptCursor:
    """Return the cursor once prompts that were put off are issued."""
    left = cursor.deferred[len(again) :]
    return msgspec.structs.replace(cursor, deferred=left)


def put_off(turn: Turn, prompts: Iterable[PromptIndex]) -> None:
    cursor = turn.state.cursor
    assert cursor is not None, "a step was open"
    turn.set(cursor=put_behind(cursor, prompts))


def put_behind(cursor: PromptCursor, prompts: Iterable[PromptIndex]) -> PromptCursor:
    """Return a cursor with prompts that are put off."""
    return msgspec.structs.replace(cursor, deferred=(*cursor.deferred, *prompts))
