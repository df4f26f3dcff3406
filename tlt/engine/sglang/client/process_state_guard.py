"""Restore the process state that importing and starting SGLang changes.

SGLang replaces the event loop policy, the root logger's handlers, signal handlers and the start
method of multiprocessing, and sets variables that other libraries read (NCCL's among them).
Garbage collection is off meanwhile: it would take a third of the time.
"""

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager

_SIGNALS = (signal.SIGQUIT, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


@contextmanager
def restore_process_state(environment: Mapping[str, str]) -> Generator[None]:
    """Add `environment` inside the context, and restore all process state after it."""
    variables = dict(os.environ)
    policy = asyncio.get_event_loop_policy()  # pyright: ignore[reportDeprecated]
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    root = logging.getLogger()
    loggers, level, disabled = root.handlers[:], root.level, root.manager.disable
    start_method = multiprocessing.get_start_method(allow_none=True)
    collecting, thresholds = gc.isenabled(), gc.get_threshold()
    gc.disable()
    os.environ.update(environment)
    try:
        # errors are raised; other messages also come from the scheduler
        logging.disable()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        asyncio.set_event_loop_policy(policy)  # pyright: ignore[reportDeprecated]
        for number, handler in handlers.items():
            signal.signal(number, handler)
        root.handlers[:] = loggers
        root.setLevel(level)
        logging.disable(disabled)
        multiprocessing.set_start_method(start_method, force=True)
        gc.set_threshold(*thresholds)
        if collecting:
            gc.enable()
