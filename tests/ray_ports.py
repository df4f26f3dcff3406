"""Read who answers at the ports on which a session's processes listen."""

import contextlib
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from http.client import HTTPException
from pathlib import Path

import grpc

# as /proc writes addresses
LOOPBACK, EVERYWHERE = "0100007F", "0" * 32
METRICS_PORT = 44217
_LISTENS = "0A"
_SECONDS = 10.0
# a call that each server of Ray knows: calls that it doesn't know are refused before the token
CALLS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "NodeManagerService/GetNodeStats",
    "ObjectManagerService/Pull",
    "CoreWorkerService/GetCoreWorkerStats",
)


def listening(pids: Collection[int]) -> dict[int, set[str]]:
    """Return the ports on which these processes listen, and at which addresses, as /proc has it."""
    ports: dict[str, tuple[int, str]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENS:
                address, _, port = local.partition(":")
                ports[f"socket:[{inode}]"] = (int(port, 16), address)
    found: dict[int, set[str]] = {}
    for link in _open_files(pids):
        if link in ports:
            port, address = ports[link]
            found.setdefault(port, set()).add(address)
    return found


def _open_files(pids: Collection[int]) -> Iterator[str]:
    for pid in pids:
        with contextlib.suppress(OSError):  # the process or the file is gone
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    yield os.readlink(f"/proc/{pid}/fd/{name}")


def call(address: str, token: str | None = None) -> dict[str, grpc.StatusCode]:
    """Return how each of Ray's calls ends that the server at this address knows."""
    metadata = [("authorization", f"Bearer {token}")] if token is not None else []
    ends: dict[str, grpc.StatusCode] = {}
    with grpc.insecure_channel(address) as channel:
        for name in CALLS:
            try:
                channel.unary_unary(f"/ray.rpc.{name}")(b"", timeout=_SECONDS, metadata=metadata)
                ends[name] = grpc.StatusCode.OK
            except grpc.RpcError as error:
                ends[name] = error.code()
    return {n: end for n, end in ends.items() if end != grpc.StatusCode.UNIMPLEMENTED}


def page(address: str) -> int | None:
    """Return the status of a page that is asked for without a token, or None if it isn't HTTP."""
    try:
        with urllib.request.urlopen(f"http://{address}/", timeout=_SECONDS) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, HTTPException):
        return None


def own_address() -> str:
    """Return an address of this machine that other hosts may reach, or the loopback's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]
