"""Validate requests, order those that wait, and track all that have not been returned yet.

A submission with an invalid request is refused as a whole. Requests wait in the order of arrival.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from tlt.engine.base import Completion, Request
from tlt.errors import ConfigError


class RequestQueue:
    def __init__(self, vocabulary: int, max_context: int) -> None:
        self._vocabulary = vocabulary
        self._max_context = max_context
        self._ids: set[int] = set()
        self.waiting: deque[Request] = deque()
        # ids of requests to be returned as cancelled, waiting or running
        self.cancelled: set[int] = set()

    @property
    def running(self) -> int:
        """Count the requests that are neither returned nor cancelled."""
        return len(self._ids) - len(self.cancelled)

    def submit(self, requests: Sequence[Request]) -> None:
        ids = [request.id for request in requests]
        if len({*ids, *self._ids}) < len(ids) + len(self._ids):
            raise ConfigError("two requests of the same id cannot run at once")
        for request in requests:
            self._validate(request)
        self._ids.update(ids)
        self.waiting.extend(requests)

    def cancel(self, ids: Iterable[int]) -> set[int]:
        """Return the ids that this call cancelled."""
        fresh = self._ids.intersection(ids) - self.cancelled
        self.cancelled |= fresh
        return fresh

    def take_cancelled(self) -> list[Completion]:
        """Remove the cancelled requests that still wait, and return their empty completions."""
        if not self.cancelled:
            return []
        dropped = [request.id for request in self.waiting if request.id in self.cancelled]
        self.waiting = deque(r for r in self.waiting if r.id not in self.cancelled)
        for id in dropped:
            self.finish(id)
        return [_empty_completion(id) for id in dropped]

    def finish(self, id: int) -> None:
        """Forget a request that is returned now."""
        self._ids.remove(id)
        self.cancelled.discard(id)

    def _validate(self, request: Request) -> None:
        prompt, most = request.prompt, self._max_context - 1
        if not 1 <= len(prompt) <= most:
            raise ConfigError(
                f"request {request.id}: a prompt of {len(prompt)} tokens doesn't fit: "
                f"1 to {most} leave room for an answer"
            )
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise ConfigError(
                f"request {request.id}: the prompt holds a token outside the model's "
                f"vocabulary of {self._vocabulary}"
            )
        if request.max_new_tokens < 1:
            raise ConfigError(f"request {request.id}: max_new_tokens must be at least 1")


def _empty_completion(id: int) -> Completion:
    return Completion(
        id=id,
        tokens=[],
        logprobs=[],
        text="",
        stop="cancelled",
        policies=(),
        drafters=(),
        origins=(),
        batches=(),
        decode_seconds=0.0,
    )
