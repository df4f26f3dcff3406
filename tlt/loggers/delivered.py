"""What each logger of a run has been told, in a file of its own in the run's folder."""

import contextlib
import os
import secrets
from pathlib import Path

import msgspec

FOLDER = "loggers"


class Delivered(msgspec.Struct, frozen=True, kw_only=True):
    """By all processes that told it something."""

    # of the run, for where names have to be unique
    identity: str
    reports: int = 0
    # why it is left alone
    error: str | None = None


def read(run: Path, logger: str) -> Delivered:
    try:
        return msgspec.json.decode(_file(run, logger).read_bytes(), type=Delivered)
    except (FileNotFoundError, msgspec.DecodeError):
        return Delivered(identity=secrets.token_hex(4))


def write(run: Path, logger: str, had: Delivered) -> None:
    """On a full disk a step may be told twice."""
    file = _file(run, logger)
    unfinished = file.with_name(f".{file.name}")
    with contextlib.suppress(OSError):
        unfinished.write_bytes(msgspec.json.encode(had))
        os.replace(unfinished, file)


def _file(run: Path, logger: str) -> Path:
    return run / FOLDER / f"{logger}.json"
