"""Restrict which files this process and its children may write, or read (Linux's Landlock)."""

import ctypes
import os
import struct
from collections.abc import Iterable, Sequence

from tlt.errors import IsolationError

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
# remove and make files, folders, devices, sockets and links
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))
# since versions 2 and 3
_MOVE, _TRUNCATE = 1 << 13, 1 << 14
# what a rule for a file, not a folder, may allow
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE

_libc = ctypes.CDLL(None, use_errno=True)


def has_landlock() -> bool:
    return _version() >= 1


def _version() -> int:
    return _libc.syscall(_CREATE_RULESET, None, 0, _GET_VERSION)


def restrict_files(writable: Iterable[str], readable: Sequence[str] | None = None) -> None:
    """Allow writing beneath some paths only, and reading too if `readable` is given.

    Raise IsolationError if the kernel has no Landlock.
    """
    version = _version()
    if version < 1:
        raise IsolationError("the kernel has no Landlock, which limits files")
    writing = _WRITE_FILE | _CHANGE_FOLDER
    writing |= (_MOVE if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    reading = 0 if readable is None else _READ_FILE | _READ_DIR | _EXECUTE
    ruleset = _checked(
        _libc.syscall(_CREATE_RULESET, struct.pack("=Q", writing | reading), 8, 0), "a ruleset"
    )
    try:
        for path in writable:
            _allow(ruleset, path, writing | reading)
        for path in readable or ():
            _allow(ruleset, path, reading)
        _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
        _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "the restriction")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    """Add a rule; a path that isn't there needs none."""
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        allowed = access if os.path.isdir(path) else access & _OF_A_FILE
        rule = struct.pack("=Qi", allowed, beneath)
        _checked(_libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0), path)
    finally:
        os.close(beneath)


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise IsolationError(f"Landlock: {what}: {os.strerror(ctypes.get_errno())}")
    return result
