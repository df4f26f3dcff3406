"""A store for committed blobs at a URL of fsspec, such as `s3://bucket/folder`.

The name of an object is the digest of its bytes. Credentials come from the environment or the
host's role, by the rules of the package that serves the URL, and never from the URL itself.
"""

import contextlib
import secrets
import tempfile
from collections.abc import Callable, Collection, Generator
from concurrent.futures import Future, wait
from functools import cached_property, partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from tlt.errors import BlobLost, ConfigError, StoreUnreachable, is_out_of_space
from tlt.protocol.refs import BlobRef

_LOCAL = "file://"
_PROBE = b"tlt"
# a file is transferred in parts of 50 MB at most
_PART_SECONDS = 300.0
_Result = TypeVar("_Result")


def blobs_url(place: str) -> str:
    """Return the URL of a path or URL that a user has written."""
    scheme, separator, rest = place.partition("://")
    if not separator:
        return f"{_LOCAL}{Path(place).expanduser().resolve()}"
    user, at, _ = rest.partition("/")[0].rpartition("@")
    if "?" in rest or (at and ":" in user):
        raise ConfigError(
            f"--blobs {scheme}://…: a URL must hold no credentials and no options; "
            "set them in the environment of all hosts"
        )
    if f"{scheme}://" == _LOCAL and not rest.startswith("/"):
        raise ConfigError(f"--blobs {place}: write file:///, and then the path")
    return place.rstrip("/")


def local_folder(url: str) -> Path | None:
    """Return the folder of a `file://` URL."""
    return Path(url.removeprefix(_LOCAL)) if url.startswith(_LOCAL) else None


def open_store(place: str) -> "BlobStore":
    """Return the store at a path or URL that a user has written, once this host can use it."""
    store = BlobStore(blobs_url(place))
    try:
        if (folder := local_folder(store.url)) is not None:
            folder.mkdir(parents=True, exist_ok=True)
        store.check()
    except (StoreUnreachable, OSError) as error:
        raise ConfigError(f"--blobs {error}") from error
    return store


class BlobStore:
    """Write objects as a whole; one of another size counts as missing."""

    def __init__(self, url: str, answer_seconds: float = 60.0) -> None:
        self.url = url
        self._answer_seconds = answer_seconds

    def has(self, ref: BlobRef) -> bool:
        with self._translated("read"):
            try:
                found = self._call(lambda: self._fs.info(self._path(ref.digest)))
                return found["size"] == ref.bytes
            except FileNotFoundError:
                return False

    def put(self, file: Path, ref: BlobRef) -> None:
        """Upload a file, and return once it is there."""
        with self._translated("written"):
            try:
                self._transfer("put_file", str(file), self._path(ref.digest))
            except FileNotFoundError as error:
                if not file.exists():
                    raise BlobLost(f"{file}: released while it was read") from error
                raise  # there is no such bucket
        if not self.has(ref):
            raise StoreUnreachable(f"{self.url}: {ref.digest} was written, but isn't there")

    def get(self, ref: BlobRef, file: Path) -> None:
        """Download to a file, whose bytes the caller verifies."""
        with self._read(ref.digest):
            self._transfer("get_file", self._path(ref.digest), str(file))

    def read_part(self, ref: BlobRef, offset: int, size: int) -> bytes:
        with self._read(ref.digest):
            path, end = self._path(ref.digest), offset + size
            return self._call(lambda: self._fs.cat_file(path, start=offset, end=end))

    def copy(self, ref: BlobRef, source: "BlobStore") -> bool:
        """Copy from another place in the same store; return False if it is another store."""
        if self._fs != source._fs:
            return False
        with source._read(ref.digest):
            self._fs.cp_file(source._path(ref.digest), self._path(ref.digest))
        return True

    def names(self) -> set[str]:
        with self._translated("listed"):
            try:
                listed = self._call(lambda: self._fs.ls(self._root, detail=False))
            except FileNotFoundError:
                return set()
        # a folder may be an object, too, with an empty name
        return {str(path).rpartition("/")[2] for path in listed} - {""}

    def delete(self, names: Collection[str]) -> None:
        for path in map(self._path, names):
            with self._translated("deleted from"), contextlib.suppress(FileNotFoundError):
                self._call(lambda path=path: self._fs.rm_file(path))

    def check(self) -> None:
        """Write, list, read and delete an object; raise StoreUnreachable if that fails."""
        with self.probe() as probe:
            self.find(probe)

    @contextlib.contextmanager
    def probe(self) -> Generator[str]:
        """Yield the name of an object that others can find; delete it afterwards."""
        name = f".probe-{secrets.token_hex(8)}"
        with self._translated("written"), tempfile.NamedTemporaryFile() as file:
            file.write(_PROBE)
            file.flush()
            self._call(lambda: self._fs.put_file(file.name, self._path(name)))
        try:
            yield name
        finally:
            self.delete([name])

    def find(self, probe: str) -> None:
        """Raise StoreUnreachable if a probe isn't listed or can't be read."""
        listed = probe in self.names()
        with self._translated("read"):
            read = self._call(lambda: self._fs.cat_file(self._path(probe)))
        if not listed or read != _PROBE:
            raise StoreUnreachable(f"{self.url}: an object that was just written isn't there")

    @property
    def _fs(self) -> Any:
        return self._opened[0]

    @property
    def _root(self) -> str:
        return self._opened[1]

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """Return the file system and the store's path in it, once it is needed."""
        from fsspec.core import url_to_fs

        # other processes write, too
        return url_to_fs(self.url, use_listings_cache=False)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _call(self, call: Callable[[], _Result]) -> _Result:
        return _while_progressing(call, self._answer_seconds)

    def _transfer(self, function: str, *paths: str) -> None:
        from fsspec.callbacks import Callback

        moved = Callback()
        call = partial(getattr(self._fs, function), *paths, callback=moved)
        _while_progressing(call, _PART_SECONDS, lambda: moved.value)

    @contextlib.contextmanager
    def _read(self, name: str) -> Generator[None]:
        with self._translated("read"):
            try:
                yield
            except FileNotFoundError as error:
                raise BlobLost(f"{self.url}/{name}: is gone") from error

    @contextlib.contextmanager
    def _translated(self, what: str) -> Generator[None]:
        """Translate whatever the package for this kind of URL raises."""
        try:
            yield
        except BlobLost:
            raise
        except Exception as error:
            if is_out_of_space(error):
                raise
            raise StoreUnreachable(f"{self.url}: cannot be {what}: {_explain(error)}") from error


def _explain(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _while_progressing(
    call: Callable[[], _Result], seconds: float, progress: Callable[[], int] = lambda: 0
) -> _Result:
    """Call in a thread; raise TimeoutError once there was no progress for `seconds`.

    The thread is left to itself then: some packages wait for ever where a server takes a
    connection and says nothing.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    seen = progress()
    while not wait([future], seconds).done:
        if (now := progress()) == seen:
            raise TimeoutError(f"no answer for {seconds:.0f} s")
        seen = now
    return future.result()
