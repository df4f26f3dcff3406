"""Prompts are cached ahead of their turn, a chunk per step, once for all requests that share one.

A slot that falls empty is filled by a copy, so a long prompt never holds up those who decode by
more than a chunk.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tlt.engine.native.policy_forward import PolicyForward, PrefillChunk

Prompt = tuple[int, ...]

# Tokens that are cached beside a decode step: what one chunk costs, all running rows wait.
CHUNK = 512
# Prompts held at once
PLACES = 4


@dataclass
class _Staged:
    row: int
    cached: int = 0


class PromptPrefiller:
    def __init__(self, network: PolicyForward, rows: Sequence[int]) -> None:
        """`rows` of the cache are its own."""
        self._network = network
        self._free = list(rows)
        self._places = len(rows)
        self._staged: dict[Prompt, _Staged] = {}

    def advance(self, waiting: Iterable[Prompt]) -> bool:
        """Cache up to a chunk for the prompts whose turn comes first; is there more to do?"""
        wanted = self._first(waiting)
        pieces: list[PrefillChunk] = []
        budget = CHUNK
        for prompt in wanted:
            staged = self._staged.get(prompt) or self._place(prompt, wanted)
            tokens = prompt[staged.cached : min(staged.cached + budget, len(prompt) - 1)]
            if tokens:
                pieces.append(PrefillChunk(staged.row, staged.cached, tokens))
                staged.cached += len(tokens)
                budget -= len(tokens)
        if pieces:
            self._network.prefill(pieces)
        return any(self._staged[p].cached < len(p) - 1 for p in wanted)

    def row_of(self, prompt: Prompt) -> int | None:
        """Where all but the prompt's last token is cached, if it is."""
        staged = self._staged.get(prompt)
        return staged.row if staged is not None and staged.cached == len(prompt) - 1 else None

    def forget(self) -> None:
        """The weights changed."""
        self._free += [staged.row for staged in self._staged.values()]
        self._staged.clear()

    def _first(self, waiting: Iterable[Prompt]) -> list[Prompt]:
        """As many different ones as there are places, of those that need one."""
        found: list[Prompt] = []
        for prompt in waiting:
            if len(prompt) > 1 and prompt not in found:
                found.append(prompt)
                if len(found) == self._places:
                    break
        return found

    def _place(self, prompt: Prompt, wanted: Sequence[Prompt]) -> _Staged:
        if not self._free:
            # the wanted ones fit together, so one that isn't wanted is in the way
            past = next(held for held in self._staged if held not in wanted)
            self._free.append(self._staged.pop(past).row)
        self._staged[prompt] = staged = _Staged(self._free.pop())
        return staged
