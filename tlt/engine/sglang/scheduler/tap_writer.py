"""Fill the tap in the scheduler's process, without making the device wait.

What a pass computed is copied to the host beside the next pass, and published once the copy is
complete. On a CPU nothing needs to be copied.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from tlt.engine.sglang.shared.shared_hidden_state_buffer import (
    ACCEPTED,
    CORRECTED,
    NO_DRAFTER,
    PLAIN,
    RequestName,
    Tap,
)


class Named(Protocol):
    """A request, as far as the tap needs to know it."""

    rid: str
    origin_input_ids: Sequence[int]


class StepKind(NamedTuple):
    """Say how a pass gained its tokens."""

    # True if drafts were verified
    proposed: bool = False
    # the version of the drafter that proposed them
    drafter: int | None = None


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of the policy over some requests: tensors on the host, or about to be."""

    requests: Sequence[Named]
    # by request: position of the first token that was fed, and how many were
    starts: Sequence[int] | torch.Tensor
    counts: Sequence[int] | torch.Tensor
    # rows of a request in `states`; None if they follow each other
    stride: int | None
    states: torch.Tensor | None
    # [requests] if each gained one token, or [requests * stride]
    tokens: torch.Tensor
    version: int
    kind: StepKind
    # of a prefill, by request: tokens of its text that the scheduler knows; None in decode passes
    texts: Sequence[int] | None = None

    def on_host(self) -> "Pass":
        """Return a copy on the host that is complete once the device gets there."""
        return Pass(
            requests=self.requests,
            starts=_on_host(self.starts),
            counts=_on_host(self.counts),
            stride=self.stride,
            states=None if self.states is None else _on_host(self.states),
            tokens=_on_host(self.tokens),
            version=self.version,
            kind=self.kind,
            texts=self.texts,
        )


class TapWriter:
    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._names: dict[int, RequestName] = {}
        self._prompts: dict[int, Sequence[int]] = {}
        # passes whose copies may be incomplete, with the event that completes them
        self._staged: deque[tuple[Pass, Any]] = deque()

    def stage(self, computed: Pass) -> None:
        """Publish a pass: at once if it is on the host, or by `publish_oldest`."""
        if not computed.tokens.is_cuda:
            self._publish(computed)
            return
        copied, event = computed.on_host(), torch.cuda.Event()
        event.record()
        self._staged.append((copied, event))

    def publish_oldest(self) -> None:
        """Publish the oldest staged pass, and all others that are complete."""
        required = True
        while self._staged and (required or self._staged[0][1].query()):
            copied, event = self._staged.popleft()
            event.synchronize()
            self._publish(copied)
            required = False

    def publish_staged(self) -> None:
        """Publish all staged passes."""
        while self._staged:
            self.publish_oldest()

    def holds(self, name: str, positions: int) -> bool:
        """Return True if the states of a request's first positions are known."""
        named = RequestName.read(name)
        found = self._names.get(named.slot) == named
        return found and int(self._tap.filled[named.slot]) >= positions

    def _publish(self, computed: Pass) -> None:
        starts, counts = _numbers(computed.starts), _numbers(computed.counts)
        tokens: list[int] = computed.tokens.tolist()
        running, offset = len(computed.requests), 0
        for row, request in enumerate(computed.requests):
            if computed.texts is not None:
                self._drop_results(request, computed.texts[row])
            start, count, stride = starts[row], counts[row], computed.stride
            first = offset if stride is None else row * stride
            states = None if computed.states is None else computed.states[first : first + count]
            gained = tokens[row : row + 1] if stride is None else tokens[first : first + count]
            self._write(request, start, count, states, gained, running, computed)
            offset += count

    def _write(
        self,
        request: Named,
        start: int,
        count: int,
        states: torch.Tensor | None,
        gained: Sequence[int],
        running: int,
        computed: Pass,
    ) -> None:
        """Record that `count` tokens of a request were fed, the first at position `start`."""
        named, tap = RequestName.read(request.rid), self._tap
        slot = named.slot
        if self._names.get(slot) != named:
            self._begin(named, request.origin_input_ids, start)
        end = min(start + count, tap.sizes.shape[1])
        # what a request that was retracted computes again keeps its versions and origins
        fresh = max(start, int(tap.filled[slot]))
        if fresh >= end:
            return
        tap.sizes[slot, fresh:end] = running
        tap.versions[slot, fresh:end] = computed.version
        drafter = computed.kind.drafter
        tap.drafters[slot, fresh:end] = NO_DRAFTER if drafter is None else drafter
        tap.origins[slot, fresh:end] = ACCEPTED if computed.kind.proposed else PLAIN
        if computed.kind.proposed:
            tap.origins[slot, end - 1] = CORRECTED
        # tokens that a prefill fed are known; it gains one
        known = start + count - len(gained)
        tap.tokens[slot, max(fresh, known) : end] = gained[max(fresh - known, 0) : end - known]
        if states is not None:
            tap.states[slot, fresh:end] = states[fresh - start : end - start]
        tap.filled[slot] = end

    def _drop_results(self, request: Named, known: int) -> None:
        """Forget the results that a request's scheduler dropped when it retracted the request.

        They are computed again, perhaps with new weights. The last token that it knows was fed by
        none of the passes that count.
        """
        named, tap = RequestName.read(request.rid), self._tap
        if self._names.get(named.slot) == named:
            tap.filled[named.slot] = min(int(tap.filled[named.slot]), known - 1)

    def _begin(self, name: RequestName, prompt: Sequence[int], position: int) -> None:
        """Begin a slot; states before `position` are copied from the request that computed them."""
        tap, slot = self._tap, name.slot
        source = self._find_prefix(name.salt, prompt, position) if position else None
        tap.filled[slot] = 0
        tap.holders[slot] = name.serial
        tap.sizes[slot, :position] = 0
        if source is not None and source != slot:
            tap.states[slot, :position] = tap.states[source, :position]
        tap.filled[slot] = position
        self._names[slot], self._prompts[slot] = name, prompt

    def _find_prefix(self, salt: str, prompt: Sequence[int], positions: int) -> int:
        for slot, held in self._prompts.items():
            shares = self._names[slot].salt == salt and self._tap.filled[slot] >= positions
            if shares and held[:positions] == prompt[:positions]:
                return slot
        raise LookupError("a prefix is shared with a request whose states are gone")


def _on_host(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return copy.copy_(value, non_blocking=True)


def _numbers(values: Sequence[int] | torch.Tensor) -> Sequence[int]:
    return values.tolist() if isinstance(values, torch.Tensor) else values
