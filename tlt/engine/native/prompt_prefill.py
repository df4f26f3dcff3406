"""Cache prompts before their requests start: a chunk per step, and once for all that share one.

A free slot is filled by a copy, so a long prompt delays running rows by no more than a chunk.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tlt.engine.native.kept_prefixes import KeptPrefixes
from tlt.engine.native.policy_forward import PolicyForward, PrefillChunk
from tlt.engine.native.slot_storage import SlotTensors

Prompt = tuple[int, ...]

# most tokens that are cached before a decode step, because all running rows wait for them
CHUNK = 512
# prompts that are cached at once
MOST_PROMPTS = 4


def prefill_rows(slots: int) -> range:
    """Return the rows, behind those of the slots, in which prompts are held."""
    return range(slots, slots + min(slots, MOST_PROMPTS))


@dataclass
class _HeldPrompt:
    row: int
    # tokens that are cached
    cached: int = 0


class PromptPrefiller:
    def __init__(
        self,
        forward: PolicyForward,
        rows: Sequence[int],
        slots: SlotTensors,
        kept: KeptPrefixes,
    ) -> None:
        """Hold prompts in these rows of the cache, which nothing else uses."""
        self._forward = forward
        self._slots = slots
        self._kept = kept
        self._free = list(rows)
        self._count = len(rows)
        self._held: dict[Prompt, _HeldPrompt] = {}

    def advance(self, waiting: Iterable[Prompt]) -> bool:
        """Cache up to a chunk of the first prompts; return True if some are still incomplete."""
        needed = self._first(waiting)
        chunks: list[PrefillChunk] = []
        budget = CHUNK
        for prompt in needed:
            held = self._held.get(prompt) or self._hold(prompt, needed)
            tokens = prompt[held.cached : min(held.cached + budget, len(prompt) - 1)]
            if tokens:
                chunks.append(PrefillChunk(held.row, held.cached, tokens))
                held.cached += len(tokens)
                budget -= len(tokens)
        if chunks:
            self._forward.prefill(chunks)
        return any(self._held[p].cached < len(p) - 1 for p in needed)

    def row_of(self, prompt: Prompt) -> int | None:
        """Return the row that holds all but the prompt's last token, or None."""
        held = self._held.get(prompt)
        return held.row if held is not None and held.cached == len(prompt) - 1 else None

    def clear(self) -> None:
        """Drop all prompts, after the weights changed."""
        self._free += [held.row for held in self._held.values()]
        self._held.clear()

    def _first(self, waiting: Iterable[Prompt]) -> list[Prompt]:
        """Return the first distinct prompts that need a row, as many as fit."""
        prompts: list[Prompt] = []
        for prompt in waiting:
            if len(prompt) > 1 and prompt not in prompts:
                prompts.append(prompt)
                if len(prompts) == self._count:
                    break
        return prompts

    def _hold(self, prompt: Prompt, needed: Sequence[Prompt]) -> _HeldPrompt:
        if not self._free:
            # the needed prompts fit together, so another one occupies a row
            unneeded = next(prompt for prompt in self._held if prompt not in needed)
            self._free.append(self._held.pop(unneeded).row)
        self._held[prompt] = held = _HeldPrompt(self._free.pop())
        if (found := self._kept.longest(prompt)) is not None:
            slot, tokens = found
            held.cached = min(tokens, len(prompt) - 1)
            self._slots.copy(slot, held.row, held.cached)
        return held
