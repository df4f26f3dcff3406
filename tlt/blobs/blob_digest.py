"""A blob's digest: SHA-256 over its size and a keyed sum of each page, by several threads.

The sum of a page's words times odd keys, modulo 2**64, is as fast as memory. Any change within one
word changes it; other changes but by chance don't leave it as it is. It is no defence against
forgery. Names of 40 digits are of earlier versions: BLAKE2b of the whole file.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tlt.base.id_types import Digest
from tlt.base.interrupt_check import CheckInterrupt
from tlt.protocol.refs import BlobRef

LEAF_BYTES = 4 << 20
_THREADS = min(16, len(os.sched_getaffinity(0)))
# leaves that are made, written or read at once
LEAVES_AHEAD = 2 * _THREADS
# what is handled at once is then still in the core's cache
_CHUNK_BYTES = 1 << 20
_PAGE_BYTES = 4096
_KEYS = np.frombuffer(hashlib.shake_256(b"keys of a page").digest(_PAGE_BYTES), "<u8") | 1
_EARLIER_DIGITS, _EARLIER_BYTES = 40, 20

_Sums = npt.NDArray[np.uint64]


class Leaf(NamedTuple):
    """A part of a file that lies in one leaf; any thread can make its bytes."""

    offset: int
    make: Callable[[], memoryview]


class _Part(NamedTuple):
    """A part that is written or read: sums of its pages, without what else is in them."""

    offset: int
    size: int
    sums: _Sums


def digest_bytes(data: bytes, like: Digest) -> Digest:
    """Return the digest of bytes, of the kind of another one."""
    if len(like) == _EARLIER_DIGITS:
        return Digest(hashlib.blake2b(data, digest_size=_EARLIER_BYTES).hexdigest())
    return name_sums(_sum_pages(memoryview(data)), len(data)).digest


def digest_file(file: Path, check: CheckInterrupt, like: Digest | None = None) -> BlobRef:
    """Return a file's reference, with a digest of the kind of another one."""
    with file.open("rb", buffering=0) as content:
        handle = content.fileno()
        begins = range(0, os.fstat(handle).st_size, LEAF_BYTES)
        if like is not None and len(like) == _EARLIER_DIGITS:
            return _digest_as_earlier(handle, begins, check)
        return _combine(_in_threads((partial(_read_leaf, handle, at) for at in begins), check))


def write_leaves(file: Path, leaves: Iterable[Leaf], check: CheckInterrupt) -> BlobRef:
    """Write a whole file from leaves in their order.

    At most `LEAVES_AHEAD` are in use while the next one is asked for.
    """
    with file.open("wb", buffering=0) as out:
        return _combine(_write(out.fileno(), leaves, check))


def write_share(file: Path, leaves: Iterable[Leaf], size: int, check: CheckInterrupt) -> _Sums:
    """Write some parts of a file of this size, which others write to as well.

    The sums that all writers return add up to those of the file.
    """
    sums = np.zeros(-(-size // _PAGE_BYTES), np.uint64)
    with file.open("r+b", buffering=0) as out:
        for part in _write(out.fileno(), leaves, check):
            first = part.offset // _PAGE_BYTES
            sums[first : first + len(part.sums)] += part.sums
    return sums


def name_sums(sums: _Sums, size: int) -> BlobRef:
    """Return the reference of a file from the sums of its pages."""
    digest = hashlib.sha256(sums.astype("<u8").tobytes())
    digest.update(size.to_bytes(8, "little"))
    return BlobRef(digest=Digest(digest.hexdigest()), bytes=size)


def leaves_of(data: memoryview) -> Iterator[Leaf]:
    for begin in range(0, len(data), LEAF_BYTES):
        yield Leaf(begin, partial(data.__getitem__, slice(begin, begin + LEAF_BYTES)))


def _write(handle: int, leaves: Iterable[Leaf], check: CheckInterrupt) -> Iterator[_Part]:
    return _in_threads((partial(_write_leaf, handle, leaf) for leaf in leaves), check)


def _in_threads(jobs: Iterable[Callable[[], _Part]], check: CheckInterrupt) -> Iterator[_Part]:
    """Yield the results in order; jobs are asked for a few at a time."""
    running = deque[Future[_Part]]()
    with ThreadPoolExecutor(_THREADS) as threads:
        for job in jobs:
            running.append(threads.submit(job))
            if len(running) > LEAVES_AHEAD:
                yield running.popleft().result()
            check()
        while running:
            yield running.popleft().result()
            check()


def _write_leaf(handle: int, leaf: Leaf) -> _Part:
    data, written, sums = leaf.make(), 0, list[_Sums]()
    while written < len(data):
        begin = leaf.offset + written
        chunk = data[written : written + _CHUNK_BYTES - begin % _CHUNK_BYTES]
        sums.append(_sum_pages(chunk, begin % _PAGE_BYTES))
        written += len(chunk)
        while chunk:
            count = os.pwrite(handle, chunk, begin)
            chunk, begin = chunk[count:], begin + count
    return _Part(leaf.offset, len(data), _join(sums))


def _read_leaf(handle: int, offset: int) -> _Part:
    sums, size, chunk = list[_Sums](), 0, memoryview(bytearray(_CHUNK_BYTES))
    while size < LEAF_BYTES and (count := os.preadv(handle, [chunk], offset + size)):
        sums.append(_sum_pages(chunk[:count]))
        size += count
    return _Part(offset, size, _join(sums))


def _sum_pages(chunk: memoryview, before: int = 0) -> _Sums:
    """Return the sums of pages, of which the first has `before` bytes that count as zeros."""
    if before or len(chunk) % _PAGE_BYTES:
        after = -(before + len(chunk)) % _PAGE_BYTES
        chunk = memoryview(bytes(before) + bytes(chunk) + bytes(after))
    words = np.frombuffer(chunk, "<u8").reshape(-1, len(_KEYS))
    return np.vecdot(words, _KEYS)


def _combine(parts: Iterable[_Part]) -> BlobRef:
    found = list(parts)
    sums = _join([part.sums for part in found])
    return name_sums(sums, sum(part.size for part in found))


def _join(sums: list[_Sums]) -> _Sums:
    return np.concatenate([np.empty(0, np.uint64), *sums])


def _digest_as_earlier(handle: int, begins: Iterable[int], check: CheckInterrupt) -> BlobRef:
    digest, size = hashlib.blake2b(digest_size=_EARLIER_BYTES), 0
    for begin in begins:
        part = os.pread(handle, LEAF_BYTES, begin)
        digest.update(part)
        size += len(part)
        check()
    return BlobRef(digest=Digest(digest.hexdigest()), bytes=size)
