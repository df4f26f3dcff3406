"""The order in which a job uses the prompts of several sources: each gives its weight's share.

Of any number of prompts from the beginning, a source gives its share to within one prompt (the
earliest deadline first, of fair scheduling): each of its prompts has the time from when its share
reaches the one before to when it reaches it. Sources go through epochs of their own.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from tlt.base.id_types import PromptIndex, Step
from tlt.policies.keyed_random import permuted
from tlt.protocol.refs import PromptCursor, SourceCursor
from tlt.spec.config import JobSpec


def shares(spec: JobSpec) -> list[float]:
    """Return the sources' shares of the prompts, whose sum is 1."""
    weights = [source.weight for source in spec.data.sources]
    return [weight / math.fsum(weights) for weight in weights]


def begin(
    spec: JobSpec, cursor: PromptCursor | None, step: Step, sizes: Sequence[int]
) -> PromptCursor:
    """Return the cursor of a job that starts: one that it takes over, or the step's place."""
    if cursor is not None and [source.prompts for source in cursor.sources] == list(sizes):
        return cursor
    total = step * spec.algorithm.prompts_per_step
    sources: list[SourceCursor] = []
    for share, size in zip(shares(spec), sizes, strict=True):
        drawn = int(share * total)
        epoch, position = divmod(drawn, size)
        sources.append(SourceCursor(prompts=size, epoch=epoch, position=position, drawn=drawn))
    return PromptCursor(sources=tuple(sources))


def complain_of_small_source(spec: JobSpec, sizes: Sequence[int]) -> str | None:
    """Return a complaint if a source has fewer prompts than its share of a step."""
    for source, share, size in zip(spec.data.sources, shares(spec), sizes, strict=True):
        needed = math.ceil(share * spec.algorithm.prompts_per_step)
        if size < needed:
            return (
                f"data.train: the source '{source.label}' has {size} rows, "
                f"and its share of a step is {needed}"
            )
    return None


def take(
    spec: JobSpec, cursor: PromptCursor, count: int, excluded: Collection[PromptIndex]
) -> tuple[tuple[PromptIndex, ...], PromptCursor]:
    """Return the next prompts, none of them twice, and the cursor behind them."""
    taken: list[PromptIndex] = []
    batch = set(excluded)
    held = Counter(source_of(cursor, prompt) for prompt in excluded)
    for _ in range(count):
        # a source of which the batch has all prompts leaves its turn to another
        index = next(i for i in _by_urgency(spec, cursor) if held[i] < cursor.sources[i].prompts)
        prompt, moved = _next_of(spec, cursor, index, batch)
        sources = (*cursor.sources[:index], moved, *cursor.sources[index + 1 :])
        cursor = msgspec.structs.replace(cursor, sources=sources)
        taken.append(prompt)
        batch.add(prompt)
        held[index] += 1
    return tuple(taken), cursor


def source_of(cursor: PromptCursor, prompt: PromptIndex) -> int:
    """Return the index of the source that a prompt belongs to."""
    first = 0
    for index, source in enumerate(cursor.sources):
        first += source.prompts
        if prompt < first:
            return index
    raise ValueError(f"the mixture has no prompt {prompt}")


def _by_urgency(spec: JobSpec, cursor: PromptCursor) -> list[int]:
    """Order the sources: first those whose next prompt may come, by when it must have come."""
    total = sum(source.drawn for source in cursor.sources)
    urgency: list[tuple[bool, float, int]] = []
    for index, (share, source) in enumerate(zip(shares(spec), cursor.sources, strict=True)):
        early = source.drawn >= share * (total + 1)
        urgency.append((early, (source.drawn + 1) / share, index))
    return [index for _, _, index in sorted(urgency)]


def _next_of(
    spec: JobSpec, cursor: PromptCursor, index: int, excluded: Collection[PromptIndex]
) -> tuple[PromptIndex, SourceCursor]:
    """Return the source's next prompt that is neither excluded nor skipped."""
    source = cursor.sources[index]
    first = sum(before.prompts for before in cursor.sources[:index])
    epoch, position = source.epoch, source.position
    while True:
        if position == source.prompts:
            epoch, position = epoch + 1, 0
        place = position
        if spec.data.order_by is None:
            place = permuted(position, source.prompts, spec.seed, epoch, index)
        prompt = PromptIndex(first + place)
        position += 1
        if prompt not in excluded and cursor.skipped.get(prompt, -1) < epoch:
            moved = msgspec.structs.replace(
                source, epoch=epoch, position=position, drawn=source.drawn + 1
            )
            return prompt, moved
