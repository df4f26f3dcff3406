"""The order in which a job's prompts are used: each epoch has them in another order, or sorted.

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
    # by prompt that was solved: the last epoch in which it is skipped
    skipped: dict[PromptIndex, int] = {}


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
            if prompt not in excluded and cursor.skipped.get(prompt, -1) < cursor.epoch:
                taken.append(prompt)
        if len(taken) == count:
            return tuple(taken), msgspec.structs.replace(cursor, position=position)
        cursor = msgspec.structs.replace(cursor, epoch=cursor.epoch + 1, position=0)


def skip_solved(
    spec: JobSpec, cursor: PromptCursor, solved: Collection[PromptIndex]
) -> PromptCursor:
    """Skip prompts in the epochs after the one in which all of their answers were right."""
    epochs = spec.data.skip_solved_epochs
    if epochs == 0:
        return cursor
    kept = {prompt: last for prompt, last in cursor.skipped.items() if last > cursor.epoch}
    skipped = {**kept, **dict.fromkeys(solved, cursor.epoch + epochs)}
    return msgspec.structs.replace(cursor, skipped=skipped)


def _prompt_at(spec: JobSpec, epoch: int, position: int, prompts: int) -> PromptIndex:
    if spec.data.order_by is not None:
        return PromptIndex(position)  # they were sorted when the job was prepared
    return PromptIndex(permuted(position, prompts, spec.seed, epoch))
