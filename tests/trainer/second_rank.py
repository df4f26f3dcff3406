"""Run functions in a second process, one at a time."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

# imported once, in the server that peers are forked from
_PRELOADED = ["tests.trainer.models", "tlt.trainer.process_group"]


class Peer:
    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_obey, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._pipe.send((function, arguments))

    def answer(self) -> Any:
        assert self._pipe.poll(150), "the peer doesn't answer"
        result = self._pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        self._pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def _obey(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            result = function(*arguments)
        except Exception as error:
            result = error
        pipe.send(result)
