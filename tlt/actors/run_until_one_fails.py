"""End an incarnation or a service: its exception, and the cancellation of its tasks."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

_log = structlog.get_logger("worker")


class IncarnationEnded(Exception):
    """This incarnation has ended."""


async def run_until_one_fails(*works: Coroutine[Any, Any, None]) -> None:
    """Run until one of them raises, or all are done; cancel the others and raise its error.

    A task group cancels once, and would wait forever for a task that swallowed it.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: list["asyncio.Task[None]"]) -> None:
    """Cancel tasks until they are done, because a client's time-out can swallow a cancellation."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.2)
        for task in pending:
            _log.warning("the task did not end when it was cancelled", task=repr(task))
