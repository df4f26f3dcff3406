"""The exceptions of TLT, in one place.

    TltError                     anything that a user can be told in one line
    ├── ConfigError              a spec, a data set or an argument is wrong (exit 2)
    │   ├── UnsupportedModel     a model folder that we don't run
    │   └── DataError            a row of a data set, with its file and line
    ├── NoSession                no session answers (exit 3)
    ├── StoreError               Redis is gone, refuses, or speaks another schema
    ├── BlobError                a tensor's file cannot be written, or is none of ours
    │   └── BlobLost             it is missing, cannot be read, or its checksum is wrong
    ├── JournalError             a journal cannot be written or replayed
    └── RankError                a compute process died, hung or reported a failure

Foreign errors are translated into these once, at the edge where they appear.
"""


class TltError(Exception):
    """Anything that a user can be told in one line."""


class ConfigError(TltError):
    """A spec, a data set or an argument is wrong."""


class UnsupportedModel(ConfigError):
    """A model folder that we don't run."""


class DataError(ConfigError):
    """A row of a data set is wrong; the message names the file and the line."""


class NoSession(TltError):
    """No session answers."""


class StoreError(TltError):
    """Redis is gone, refuses, or speaks another schema."""


class BlobError(TltError):
    """A tensor's file cannot be written, or is none of ours."""


class BlobLost(BlobError):
    """A tensor's file is missing, cannot be read, or its checksum is wrong."""


class JournalError(TltError):
    """A journal cannot be written or replayed."""


class RankError(TltError):
    """A compute process died, hung or reported a failure."""
