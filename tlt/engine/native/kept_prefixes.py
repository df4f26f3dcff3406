"""Find ended requests whose tokens a new prompt begins with, while their slots are intact."""

from collections.abc import Iterator, Sequence


class KeptPrefixes:
    def __init__(self) -> None:
        # by slot: the tokens that it has cached
        self._tokens: dict[int, tuple[int, ...]] = {}
        # requests that began before it lack what others have: other weights, or hidden states
        self._since = 0

    def add(self, slot: int, tokens: Sequence[int], first_step: int) -> None:
        """Note what a request that began in this step has left in its slot."""
        if first_step >= self._since:
            self.put(slot, tuple(tokens))

    def put(self, slot: int, tokens: tuple[int, ...]) -> None:
        self._tokens[slot] = tokens

    def take(self, slot: int) -> tuple[int, ...]:
        """Return what a slot has cached, and forget it."""
        return self._tokens.pop(slot, ())

    def __contains__(self, slot: int) -> bool:
        return slot in self._tokens

    def __iter__(self) -> Iterator[int]:
        """Go through the slots, those that were kept first before others."""
        return iter(self._tokens)

    def restart(self, step: int) -> None:
        """Forget all, and what requests leave that began before this step."""
        self._tokens.clear()
        self._since = step

    def longest(self, prompt: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the slot that has most of the prompt cached, and how many tokens; or None."""
        slot, most = -1, 0
        for index, tokens in self._tokens.items():
            if most < len(tokens) <= len(prompt) and prompt[: len(tokens)] == tokens:
                slot, most = index, len(tokens)
        return (slot, most) if most else None
