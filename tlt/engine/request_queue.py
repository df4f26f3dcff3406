"""The way of a request to its slot, the same for all engines.

What no engine could serve is refused when it is submitted, all of a submission together; the rest
waits in order of priority and arrival.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from tlt.engine.base import Completion, Request
from tlt.errors import ConfigError


def check_requests(
    requests: Sequence[Request], known: Collection[int], vocabulary: int, max_context: int
) -> None:
    ids = [request.id for request in requests]
    if len({*ids, *known}) < len(ids) + len(known):
        raise ConfigError("two requests of the same id cannot run at once")
    for request in requests:
        _check(request, vocabulary, max_context)


def order_queue(waiting: Iterable[Request], arriving: Iterable[Request]) -> deque[Request]:
    return deque(sorted([*waiting, *arriving], key=lambda request: -request.priority))


def cancelled_before_start(request: Request) -> Completion:
    """What comes out of a request that was cancelled while it waited."""
    return Completion(
        id=request.id,
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


def _check(request: Request, vocabulary: int, max_context: int) -> None:
    prompt, most = request.prompt, max_context - 1
    if not 1 <= len(prompt) <= most:
        raise ConfigError(
            f"request {request.id}: a prompt of {len(prompt)} tokens doesn't fit: "
            f"1 to {most} leave room for an answer"
        )
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise ConfigError(
            f"request {request.id}: the prompt holds a token outside the model's "
            f"vocabulary of {vocabulary}"
        )
    if request.max_new_tokens < 1:
        raise ConfigError(f"request {request.id}: max_new_tokens must be at least 1")
