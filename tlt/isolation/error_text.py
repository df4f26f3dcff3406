"""Describe what code of a spec has raised, and which key of its section lifts the limit it met."""

import errno
import socket
from collections.abc import Iterator


def describe(error: Exception, section: str) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    causes = list(_causes(error))
    if any(isinstance(e, socket.gaierror) or _errno(e) == errno.ENETUNREACH for e in causes):
        return f"{text}; {section}.network: true lets it use the network"
    if any(_errno(e) in (errno.EACCES, errno.EROFS) for e in causes):
        return f"{text}; {section}.writable names folders that it may write to"
    return text


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None
