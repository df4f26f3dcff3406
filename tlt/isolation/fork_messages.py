"""Define what a fork server and its client exchange: JSON with its length before it.

It is JSON, because a row's integers may be longer than MessagePack's.
"""

import struct

import msgspec

LENGTH = struct.Struct("<Q")
# instead of a process
NO_CHILD = LENGTH.pack((1 << 64) - 1)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limit what the code may use."""

    network: bool
    # of a process; None: as much as there is
    memory_gb: float | None
    # a model has written it: it reads no files of ours
    sandboxed: bool = False
    # most processes and threads that a process may start
    processes: int = 320
    # each process writes into a folder of its own, instead of one for all
    apart: bool = False
    # folders that it may write to beside its own
    writable: tuple[str, ...] = ()
    # why it doesn't run where the host lacks a limit, before those; None: it runs there
    refusal: str | None = None
    # what comes after them
    remedy: str = ""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    limits: Limits
    # the one folder that it may always write to
    folder: str
    # the section of the spec that names the code
    code: msgspec.Raw


class Started(msgspec.Struct, frozen=True, kw_only=True):
    # the code can't be loaded, so no request will ever be answered
    error: str | None = None
    # what its client has to know of the code
    about: msgspec.Raw = msgspec.Raw(b"null")
    # limits that this host doesn't have
    lacks: tuple[str, ...] = ()


def framed(message: msgspec.Struct) -> bytes:
    body = msgspec.json.encode(message)
    return LENGTH.pack(len(body)) + body
