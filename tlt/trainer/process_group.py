"""A process is in at most one group; groups are formed anew under a new name and never repaired.

Every collective of a group has the deadline that the group was joined with. Files may take longer:
for these, ranks ask the group's store.
"""

import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from tlt.errors import RankError
from tlt.trainer.collectives import translate_errors

_POLL_SECONDS = 0.05
# after which a disk or a store that takes files is stuck
_MOST_SECONDS = 3600.0
# how often the ranks of the present group have waited for each other's files
_waits = 0


def serve_rendezvous(host: str) -> tuple[TCPStore, int]:
    """Serve a rendezvous on a free port; it lives as long as the store that is returned.

    It has no password, and by itself it would listen on all addresses.
    """
    what = f"serving a rendezvous on {host}"
    try:
        listener = socket.create_server((host, 0))
    except OSError as error:
        raise RankError(f"{what} failed: {error.strerror}") from error
    port = listener.getsockname()[1]
    with translate_errors(what):
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, port


def join_group(
    rendezvous: str,
    name: str,
    rank: int,
    world: int,
    timeout_seconds: float,
    device: torch.device,
) -> ProcessGroup | None:
    """Return when all `world` members have joined; a single rank needs no group: None."""
    global _waits
    leave_group()
    _waits = 0
    if world == 1:
        return None
    host, _, port = rendezvous.rpartition(":")
    deadline = timedelta(seconds=timeout_seconds)
    if device.type == "cuda":
        # otherwise NCCL's watchdog ends the process instead of letting the collective raise
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    with translate_errors(f"joining the group {name} at {rendezvous}"):
        store = TCPStore(host, int(port), wait_for_workers=False, timeout=deadline)
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(name, store),
            rank=rank,
            world_size=world,
            timeout=deadline,
            device_id=device if device.type == "cuda" else None,
        )
    return dist.group.WORLD


def wait_for_files() -> None:
    """Return once all ranks have stored their files, which may take longer than a collective may.

    The store is the first rank's: where its process ends, an error says so.
    """
    global _waits
    _waits += 1
    key, deadline = f"files {_waits}", time.monotonic() + _MOST_SECONDS
    with translate_errors("waiting until all ranks have stored their files"):
        store = c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        store.add(key, 1)
        while store.add(key, 0) < dist.get_world_size():
            if time.monotonic() > deadline:
                raise RankError(f"a rank has stored no file for {_MOST_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # A failed join was counted, and the count is part of the store's keys: members with different
    # counts would wait for each other under different names.
    c10d._world.group_count = 0  # pyright: ignore[reportPrivateUsage]
