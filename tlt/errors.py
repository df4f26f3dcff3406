"""Define all exceptions of TLT.

    TltError                     an error that one line explains to a user
    ├── ConfigError              a spec, a data set or an argument is wrong (exit 2)
    │   ├── UnsupportedModel     a model folder that TLT doesn't run
    │   └── DataError            a row of a data set, with its file and line
    ├── NoSession                no session answers (exit 3)
    ├── StoreError               Redis is unreachable, refuses, or holds another schema
    ├── BlobError                a tensor's file cannot be written, or isn't one of TLT's
    │   ├── BlobLost             the file is missing, unreadable, or has a wrong checksum
    │   └── StoreUnreachable     the store for committed files doesn't answer, or refuses
    ├── JournalError             a journal cannot be written, read or replayed
    └── RankError                a compute process died, hung or reported a failure

Foreign errors are translated into these once, at the edge where they appear.
"""

import errno


class TltError(Exception):
    """An error that one line explains to a user."""


class ConfigError(TltError):
    """A spec, a data set or an argument is wrong."""


class UnsupportedModel(ConfigError):
    """TLT doesn't run the model of this folder."""


class DataError(ConfigError):
    """A row of a data set is wrong; the message names the file and the line."""


class NoSession(TltError):
    """No session answers."""


class StoreError(TltError):
    """Redis is unreachable, refuses, or holds another schema."""


class BlobError(TltError):
    """A tensor's file cannot be written, or isn't one of TLT's."""


class BlobLost(BlobError):
    """A tensor's file is missing, cannot be read, or its checksum is wrong."""


class StoreUnreachable(BlobError):
    """The store for committed files doesn't answer, or refuses."""


class JournalError(TltError):
    """A journal cannot be written, read or replayed."""


class IsolationError(TltError):
    """The host can't limit what a process uses."""


class RankError(TltError):
    """A compute process died, hung or reported a failure."""


def is_out_of_space(error: BaseException | None) -> bool:
    """Return True if a full disk, or a full quota, caused an error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def find_remedy(error: BaseException) -> str | None:
    """Say what has to be done so that the same write succeeds, or None if nothing is known."""
    if isinstance(error, StoreUnreachable):
        return "Once this store answers, the job goes on by itself"
    if is_out_of_space(error):
        return "Free space there, and the job goes on by itself"
    return None
