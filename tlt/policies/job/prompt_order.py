"""The order in which a job's prompts are used: each epoch has all of them in another order.

The cursor moves only forward. Without dynamic sampling a step implies where it begins.
"""

from collections.abc import Collection

import msgspec

from tlt.config import JobSpec
from tlt.id_types import PromptIndex, Step
from tlt.policies.keyed_random import permuted


class PromptCursor(msgspec.Struct, frozen=True, kw_only=True):
    """The next prompt of a job; a job that goes on elsewhere begins with it."""

    epoch: int = 0
    # prompts of the epoch that are used or skipped
    position: int = 0


def cursor_at(spec: JobSpec, step: Step, prompts: int) -> PromptCursor:
    """Return the cursor of a step before which every step used `prompts_per_step` prompts."""
    size = spec.algorithm.prompts_per_step
    epoch, index = divmod(step, prompts // size)
    return PromptCursor(epoch=epoch, position=index * size)


def take(
    spec: JobSpec,
    cursor: PromptCursor,
    prompts: int,
    count: int,
    excluded: Collection[PromptIndex] = (),
) -> tuple[tuple[PromptIndex, ...], PromptCursor]:
    """Return the next prompts, and the cursor behind them.

    An epoch that has too few left is over.
    """
    while True:
        taken: list[PromptIndex] = []
        position = cursor.position
        while len(taken) < count and position < prompts:
            prompt = _prompt_at(spec, cursor.epoch, position, prompts)
            position += 1
            if prompt not in excluded:
                taken.append(prompt)
        if len(taken) == count:
            return tuple(taken), msgspec.structs.replace(cursor, position=position)
        cursor = msgspec.structs.replace(cursor, epoch=cursor.epoch + 1, position=0)


def _prompt_at(spec: JobSpec, epoch: int, position: int, prompts: int) -> PromptIndex:
    return PromptIndex(permuted(position, prompts, spec.seed, epoch))
