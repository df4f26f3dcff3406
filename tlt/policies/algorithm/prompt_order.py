"""The order in which a job's prompts are used: each epoch has them in another order, or sorted.

The cursor moves only forward. Without dynamic sampling a step implies where it begins.
"""

from collections.abc import Collection

import msgspec

from tlt.base.id_types import PromptIndex, Step
from tlt.policies.algorithm import prompt_mixture
from tlt.policies.keyed_random import permuted
from tlt.protocol.refs import PromptCursor
from tlt.spec.config import JobSpec


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

    Prompts that were put off aren't among them. An epoch that has too few left is over, but of a
    mixture an epoch runs into the next.
    """
    excluded = {*excluded, *cursor.deferred}
    if cursor.sources:
        return prompt_mixture.take(spec, cursor, count, excluded)
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
    skipped = {
        prompt: last for prompt, last in cursor.skipped.items() if last > _epoch_of(cursor, prompt)
    }
    skipped |= {prompt: _epoch_of(cursor, prompt) + epochs for prompt in solved}
    return msgspec.structs.replace(cursor, skipped=skipped)


def _epoch_of(cursor: PromptCursor, prompt: PromptIndex) -> int:
    """Return the epoch that the prompt's source is in."""
    if not cursor.sources:
        return cursor.epoch
    return cursor.sources[prompt_mixture.source_of(cursor, prompt)].epoch


def _prompt_at(spec: JobSpec, epoch: int, position: int, prompts: int) -> PromptIndex:
    if spec.data.order_by is not None:
        return PromptIndex(position)  # they were sorted when the job was prepared
    return PromptIndex(permuted(position, prompts, spec.seed, epoch))
