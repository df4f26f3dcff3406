"""End a worker's incarnation: the exception that ends it, and the cancellation of its tasks."""

import asyncio

import structlog

_log = structlog.get_logger("worker")


class IncarnationEnded(Exception):
    """This incarnation has ended."""


async def cancel_all(tasks: list["asyncio.Task[None]"]) -> None:
    """Cancel tasks until they are done, because a client's time-out can swallow a cancellation."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.2)
        for task in pending:
            _log.warning("the task did not end when it was cancelled", task=repr(task))
