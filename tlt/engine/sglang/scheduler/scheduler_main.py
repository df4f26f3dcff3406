"""The process of SGLang's scheduler.

Run as `python -m tlt.engine.sglang.scheduler.scheduler_main FD DEVICE`. It imports
SGLang while its rank does the same, then waits for its setup. It ends with its rank, and reports
errors on standard error, a file that the rank reads.
"""

import gc
import multiprocessing
import os
import socket
import sys
from multiprocessing.connection import Connection

from tlt.engine.sglang.cpu import cpu_mode


def main() -> None:
    # garbage collection takes a third of the imports' time, and they leave none
    gc.disable()
    channel = Connection(int(sys.argv[1]))
    on_cpu = sys.argv[2] == "cpu"
    if on_cpu:
        cpu_mode.enter()
    from sglang.srt.managers.scheduler import run_scheduler_process

    from tlt.engine.sglang.scheduler import scheduler_hooks
    from tlt.engine.sglang.shared.frame_socket import FrameSocket
    from tlt.engine.sglang.shared.scheduler_options import options_of_process
    from tlt.engine.sglang.shared.speculation_messages import (
        ControlPort,
        FromScheduler,
        ToScheduler,
    )

    if on_cpu:
        from tlt.engine.sglang.cpu import sglang_patches

        sglang_patches.apply()
    if (options := options_of_process()) is not None:
        descriptor = options.socket

        def connect() -> ControlPort:
            end = socket.socket(fileno=descriptor)
            return FrameSocket[FromScheduler, ToScheduler](end, ToScheduler)

        scheduler_hooks.install(options, connect)
    gc.freeze()
    gc.enable()
    try:
        authkey, arguments, ports, gpu, tensor_rank = channel.recv()
    except EOFError:
        return
    multiprocessing.current_process().authkey = authkey
    run_scheduler_process(arguments, ports, gpu, tensor_rank, 0, None, channel)
    # this call returns only after a failure, which it has logged
    os._exit(1)


if __name__ == "__main__":
    main()
