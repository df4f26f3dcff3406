"""Read and write a session's folder: its spec, and whether it is up."""

import fcntl
import hashlib
import os
import tempfile
from pathlib import Path

import msgspec

from tlt.errors import ConfigError, NoSession
from tlt.spec.config import SessionSpec

SESSION_FILE = "session.json"
READY_FILE = "ready.json"
# whoever holds its lock supervises the session, and has written its process id into it
LOCK_FILE = "lock"


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    error: str | None


def home() -> Path:
    return Path(os.environ.get("TLT_HOME", "~/.tlt")).expanduser()


def session_folder(name: str) -> Path:
    if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
        raise ConfigError(f"--session {name}: letters, digits, '-', '_' and '.' only")
    return home() / "sessions" / name


def short_name_prefix() -> str:
    return f"tlt-{os.getuid()}-"


def short_folder(folder: Path) -> Path:
    """Return a folder for sockets, whose paths must be short."""
    name = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=5).hexdigest()
    return Path(tempfile.gettempdir()) / f"{short_name_prefix()}{name}"


def shared_memory() -> Path:
    folder = Path("/dev/shm")
    return folder if folder.is_dir() else Path(tempfile.gettempdir())


def blobs_in_flight(short: Path) -> Path:
    """Return the folder for blobs that belongs to a folder for sockets."""
    return shared_memory() / f"{short.name}-blobs"


def write_session(spec: SessionSpec) -> None:
    folder = Path(spec.folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder}: it must be a folder of your own")
    folder.chmod(0o700)
    replace_file(folder / SESSION_FILE, msgspec.json.format(msgspec.json.encode(spec)))


def load_session(folder: Path) -> SessionSpec:
    try:
        return msgspec.json.decode((folder / SESSION_FILE).read_bytes(), type=SessionSpec)
    except FileNotFoundError as error:
        raise NoSession(f"there is no session '{folder.name}': start one with `tlt up`") from error


def write_ready(folder: Path, ready: Ready) -> None:
    replace_file(folder / READY_FILE, msgspec.json.encode(ready))


def read_ready(folder: Path) -> Ready | None:
    try:
        return msgspec.json.decode((folder / READY_FILE).read_bytes(), type=Ready)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def read_supervisor(folder: Path) -> int | None:
    """Return the process id of the last supervisor that has taken the session's lock."""
    try:
        return int((folder / LOCK_FILE).read_bytes())
    except (OSError, ValueError):  # nothing could be written, or by an older release
        ready = read_ready(folder)
        return None if ready is None else ready.pid


def is_up(folder: Path) -> bool:
    """Return True if a supervisor holds the session's lock, which ends with its process."""
    try:
        with open(folder / LOCK_FILE, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def replace_file(file: Path, content: bytes) -> None:
    """Replace a file as a whole; only its user may read it, as a URL may hold a password."""
    unfinished = file.with_name(f".{file.name}")
    unfinished.unlink(missing_ok=True)
    unfinished.touch(mode=0o600)
    unfinished.write_bytes(content)
    os.replace(unfinished, file)
