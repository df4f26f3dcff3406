"""What no engine could serve is refused when it is submitted, all of a submission together."""

from collections.abc import Collection, Sequence

from tlt.engine.base import Request
from tlt.errors import ConfigError


def check_requests(
    requests: Sequence[Request], known: Collection[int], vocabulary: int, max_context: int
) -> None:
    ids = [request.id for request in requests]
    if len({*ids, *known}) < len(ids) + len(known):
        raise ConfigError("two requests of the same id cannot run at once")
    for request in requests:
        _check(request, vocabulary, max_context)


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
