"""Store how many reports each logger of a run has received, in a file in the run's folder."""

import contextlib
import os
import secrets
from pathlib import Path

import msgspec

FOLDER = "loggers"


class DeliveryState(msgspec.Struct, frozen=True, kw_only=True):
    # identifies the run where names have to be unique
    identity: str
    # reports that were sent, by this process and earlier ones
    reports: int = 0
    # why the logger is not called any more
    error: str | None = None


def read(run: Path, logger: str) -> DeliveryState:
    try:
        return msgspec.json.decode(_file(run, logger).read_bytes(), type=DeliveryState)
    except (FileNotFoundError, msgspec.DecodeError):
        return DeliveryState(identity=secrets.token_hex(4))


def write(run: Path, logger: str, state: DeliveryState) -> None:
    """Replace the file; on a full disk the old one stays, and a step may be sent twice."""
    file = _file(run, logger)
    unfinished = file.with_name(f".{file.name}")
    with contextlib.suppress(OSError):
        unfinished.write_bytes(msgspec.json.encode(state))
        os.replace(unfinished, file)


def _file(run: Path, logger: str) -> Path:
    return run / FOLDER / f"{logger}.json"
