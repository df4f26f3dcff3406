"""Limit what code may use that scores answers: memory, files, network, processes.

Namespaces let a process be ended together with all that it has started, and keep it off the
network. Where a host allows none (some containers and distributions), `reward.isolation` says if a
function runs with the limits that it has.
"""

import contextlib
import ctypes
import glob
import math
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

from tlt.base.child_process import die_with_parent
from tlt.errors import IsolationError

_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000
_CLONE_NEWNET, _CLONE_NEWIPC = 0x40000000, 0x08000000
# files of a process, and bytes that it may write into one of them
_MOST_OPEN, _MOST_WRITTEN = 4096, 4 << 30
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
# what an interpreter and compiled programs read
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/proc/self", "/sys/devices/system")

# since this kernel a process namespace has a number of its own; before, it was the machine's
_NAMESPACED_PID_MAX = (6, 14)
_PID_MAX = "/proc/sys/kernel/pid_max"

_libc = ctypes.CDLL(None, use_errno=True)


def readable_system() -> tuple[str, ...]:
    """Return what a Python program has to read besides its own files."""
    return (*_SYSTEM, sys.prefix, sys.base_prefix)


def namespaces_work(network: bool) -> bool:
    """Try in a child: where a host refuses half of it, the process can't go back."""
    child = os.fork()
    if not child:
        try:
            enter_namespaces(network)
            os._exit(0)
        except IsolationError:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def enter_namespaces(network: bool) -> None:
    """Move to a user and a process namespace, and off the network unless it is wanted.

    This process becomes the outer end: it waits for the first process of the namespace, which
    returns, and all others end with it. The process may have no threads yet.
    """
    user, group = os.getuid(), os.getgid()
    flags = _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWIPC | (0 if network else _CLONE_NEWNET)
    if _libc.unshare(flags) != 0:
        raise IsolationError(f"no namespaces: {os.strerror(ctypes.get_errno())}")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    first = os.fork()
    if first:
        _, status = os.waitpid(first, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent(signal.SIGKILL)()


def fork_apart(namespaces: bool, network: bool, processes: int) -> int:
    """Fork a child that is the first of a process namespace of its own if there are any.

    It ends with this process, and all that it starts with it. It shares no memory with the other
    children, and without a network no sockets.
    """
    if namespaces:
        if _libc.unshare(_CLONE_NEWPID) != 0:
            raise IsolationError(f"no process namespace: {os.strerror(ctypes.get_errno())}")
        child = os.fork()
        if child:
            # back to this process's namespace: the next child gets another one
            own = os.open("/proc/self/ns/pid", os.O_RDONLY)
            try:
                if _libc.setns(own, _CLONE_NEWPID) != 0:
                    raise IsolationError("the process namespace cannot be left")
            finally:
                os.close(own)
    else:
        child = os.fork()
    if not child:
        die_with_parent(signal.SIGKILL)()
        os.setsid()
        if namespaces:
            _libc.unshare(_CLONE_NEWIPC | (0 if network else _CLONE_NEWNET))
            _limit_processes(processes)
    return child


def end_others() -> None:
    """End all that this process has started, if it is the first of a process namespace."""
    with contextlib.suppress(ProcessLookupError):
        while os.getpid() == 1:
            os.kill(-1, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)


def remove_folder(folder: str | Path) -> None:
    """Remove what user code has left, nested however deep."""
    subprocess.run(["rm", "-rf", "--", str(folder)], check=False, stderr=subprocess.DEVNULL)


def _limit_processes(most: int) -> None:
    """Limit how many this process may start; root is exempt from the resource limit.

    Landlock comes later: it would deny the file.
    """
    if _kernel() >= _NAMESPACED_PID_MAX:
        with contextlib.suppress(OSError), open(_PID_MAX, "w") as file:
            file.write(str(most))
    else:
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (least, least))


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])


def limit_resources(memory_gb: float) -> None:
    """Limit the memory and the files of this process, and of all that it starts."""
    for kind, most in (
        *(() if math.isinf(memory_gb) else ((resource.RLIMIT_DATA, int(memory_gb * 1e9)),)),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _MOST_OPEN),
        (resource.RLIMIT_FSIZE, _MOST_WRITTEN),
    ):
        _, hard = resource.getrlimit(kind)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (least, least))


def devices() -> tuple[str, ...]:
    """Return what a program may write to besides its own files."""
    return (*_DEVICES, *glob.glob("/dev/nvidia*"))


def _write(file: str, text: str) -> None:
    try:
        with open(file, "w") as opened:
            opened.write(text)
    except OSError as error:
        raise IsolationError(f"no user namespace: {error.strerror}") from error
