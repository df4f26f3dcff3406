"""SGLang takes the process that imports and starts it for its own; this gives it back as it was.

It replaces the event loop policy, the root logger's handlers, signal handlers and the way in which
multiprocessing starts children, and sets variables that other libraries read (NCCL's among them).
Garbage is not collected meanwhile: that would take a third of the time.
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
    """Inside, `environment` is added to the process's own."""
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
        # what goes wrong is raised; the rest would be said twice, by the scheduler too
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
