"""Run code of a spec in processes that may be killed.

A module that calls `serve` is started with `-m` and a descriptor. It limits itself, loads the code
once, and forks a child for each byte that arrives; the child's socket and a handle to kill it go
back. A child answers one request after the other.
"""

import math
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tlt.errors import ConfigError, IsolationError
from tlt.isolation.fork_messages import (
    LENGTH,
    NO_CHILD,
    Limits,
    Start,
    Started,
    framed,
)
from tlt.isolation.landlock import has_landlock, restrict_files
from tlt.isolation.limits import (
    devices,
    end_others,
    enter_namespaces,
    fork_apart,
    limit_resources,
    namespaces_work,
    readable_system,
)

_NO_NAMESPACES = "the host allows no user namespaces, which limit network and processes"
_NO_LANDLOCK = "the kernel has no Landlock, which limits files"


class Reply(NamedTuple):
    message: msgspec.Struct
    # end what the code has started meanwhile
    ends_others: bool = True


class LoadedCode(NamedTuple):
    answer: Callable[[bytes], Reply]
    # what the client has to know of it
    about: msgspec.Raw = msgspec.Raw(b"null")


def serve(load: Callable[[msgspec.Raw], LoadedCode]) -> None:
    """Serve the client behind the first argument; `load` may raise ConfigError."""
    control = socket.socket(fileno=int(sys.argv[1]))
    start = msgspec.json.decode(_read(control), type=Start)
    isolated, lacks = _isolate(start)
    try:
        if lacks and start.limits.refusal is not None:
            missing = "; ".join(lacks)
            raise ConfigError(f"{start.limits.refusal}: {missing}{start.limits.remedy}")
        code = load(start.code)
    except ConfigError as error:
        control.sendall(framed(Started(error=str(error))))
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control.sendall(framed(Started(about=code.about, lacks=tuple(lacks))))
    while control.recv(1):
        _fork_child(control, code, start, isolated)


def _isolate(start: Start) -> tuple[bool, list[str]]:
    """Limit network and memory; return if there are namespaces, and which limits the host lacks."""
    limits, lacks = start.limits, list[str]()
    isolated = namespaces_work(limits.network)
    if isolated:
        enter_namespaces(limits.network)
    else:
        lacks.append(_NO_NAMESPACES)
    os.chdir(start.folder)
    os.environ |= {"TMPDIR": start.folder}
    limit_resources(math.inf if limits.memory_gb is None else limits.memory_gb)
    if not has_landlock():
        lacks.append(_NO_LANDLOCK)
    return isolated, lacks


def _fork_child(control: socket.socket, code: LoadedCode, start: Start, isolated: bool) -> None:
    ours, theirs = socket.socketpair()
    try:
        child = fork_apart(isolated, start.limits.network, start.limits.processes)
    except IsolationError as error:
        print(f"no child: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:  # too many processes, or too little memory
        print(f"no child: {error}", file=sys.stderr)
        with ours, theirs:
            control.sendall(NO_CHILD)
        return
    if not child:
        control.close()
        ours.close()
        _answer_requests(theirs, code, start)
    with ours, theirs:
        handle = os.pidfd_open(child)
        try:
            # in a namespace all that the child starts ends with it; elsewhere its group is killed
            group = LENGTH.pack(0 if isolated else child)
            socket.send_fds(control, [group], [ours.fileno(), handle])
        finally:
            os.close(handle)


def _answer_requests(link: socket.socket, code: LoadedCode, start: Start) -> None:
    """Answer until the link is closed, and end without anything that the parent registered."""
    status, own = 1, os.getpid()
    try:
        # subprocesses of the code are waited for
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # the first process of a namespace can be ended by what it handles alone
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        folder = start.folder
        if start.limits.apart:
            folder = tempfile.mkdtemp(dir=folder)
            os.chdir(folder)
            os.environ |= {"TMPDIR": folder}
            tempfile.tempdir = None
        if has_landlock():
            _limit_files(start.limits, folder)
        while body := _read(link):
            reply = code.answer(body)
            if os.getpid() != own:
                break  # a copy that user code has forked answers nobody
            link.sendall(framed(reply.message))
            if reply.ends_others:
                end_others()
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _limit_files(limits: Limits, folder: str) -> None:
    """Allow writing to its own folder and to the spec's; code of a model reads no files of ours."""
    package = str(Path(__file__).parents[1])
    readable = (*readable_system(), package) if limits.sandboxed else None
    restrict_files((folder, *limits.writable, *devices()), readable)


def _read(link: socket.socket) -> bytes:
    head = _read_exactly(link, LENGTH.size)
    return _read_exactly(link, LENGTH.unpack(head)[0]) if head else b""


def _read_exactly(link: socket.socket, count: int) -> bytes:
    parts: list[Any] = []
    while count > 0:
        part = link.recv(min(count, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
