"""Wait for conditions with a deadline instead of sleeping for a guessed time."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable


async def wait_until(
    condition: Callable[[], object | Awaitable[object]],
    deadline: float = 20.0,
    message: str = "it did not come true",
) -> None:
    """Poll a condition, which may be asynchronous, until it is true."""
    end = time.monotonic() + deadline
    while True:
        holds = condition()
        if inspect.isawaitable(holds):
            holds = await holds
        if holds:
            return
        if time.monotonic() > end:
            raise AssertionError(f"after {deadline:g} s: {message}")
        await asyncio.sleep(0.005)
