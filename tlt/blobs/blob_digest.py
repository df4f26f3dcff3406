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

import numpy as np

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

# makes the bytes of a leaf, in any thread
Leaf = Callable[[], memoryview]
# sums of a leaf's pages, and its size
_Sums = tuple[bytes, int]


def digest_bytes(data: bytes, like: Digest) -> Digest:
    """Return the digest of bytes, of the kind of another one."""
    if len(like) == _EARLIER_DIGITS:
        return Digest(hashlib.blake2b(data, digest_size=_EARLIER_BYTES).hexdigest())
    return _combine([(_sum_pages(memoryview(data)), len(data))]).digest


def digest_file(file: Path, check: CheckInterrupt, like: Digest | None = None) -> BlobRef:
    """Return a file's reference, with a digest of the kind of another one."""
    with file.open("rb", buffering=0) as content:
        handle = content.fileno()
        begins = range(0, os.fstat(handle).st_size, LEAF_BYTES)
        if like is not None and len(like) == _EARLIER_DIGITS:
            return _digest_as_earlier(handle, begins, check)
        return _combine(_in_threads((partial(_read_leaf, handle, at) for at in begins), check))


def write_leaves(file: Path, leaves: Iterable[Leaf], check: CheckInterrupt) -> BlobRef:
    """Write leaves, of which all but the last are whole.

    At most `LEAVES_AHEAD` are in use while the next one is asked for.
    """
    with file.open("wb", buffering=0) as out:
        write = partial(_write_leaf, out.fileno())
        jobs = (partial(write, number * LEAF_BYTES, leaf) for number, leaf in enumerate(leaves))
        return _combine(_in_threads(jobs, check))


def leaves_of(data: memoryview) -> Iterator[Leaf]:
    for begin in range(0, len(data), LEAF_BYTES):
        yield partial(data.__getitem__, slice(begin, begin + LEAF_BYTES))


def _in_threads(jobs: Iterable[Callable[[], _Sums]], check: CheckInterrupt) -> Iterator[_Sums]:
    """Yield the results in order; jobs are asked for a few at a time."""
    running = deque[Future[_Sums]]()
    with ThreadPoolExecutor(_THREADS) as threads:
        for job in jobs:
            running.append(threads.submit(job))
            if len(running) > LEAVES_AHEAD:
                yield running.popleft().result()
            check()
        while running:
            yield running.popleft().result()
            check()


def _write_leaf(handle: int, offset: int, make: Leaf) -> _Sums:
    leaf, sums = make(), list[bytes]()
    for begin in range(0, len(leaf), _CHUNK_BYTES):
        chunk = leaf[begin : begin + _CHUNK_BYTES]
        sums.append(_sum_pages(chunk))
        while chunk:
            count = os.pwrite(handle, chunk, offset)
            chunk, offset = chunk[count:], offset + count
    return b"".join(sums), len(leaf)


def _read_leaf(handle: int, offset: int) -> _Sums:
    sums, size, chunk = list[bytes](), 0, memoryview(bytearray(_CHUNK_BYTES))
    while size < LEAF_BYTES and (count := os.preadv(handle, [chunk], offset + size)):
        sums.append(_sum_pages(chunk[:count]))
        size += count
    return b"".join(sums), size


def _sum_pages(chunk: memoryview) -> bytes:
    if left := -len(chunk) % _PAGE_BYTES:
        chunk = memoryview(bytes(chunk) + bytes(left))
    words = np.frombuffer(chunk, "<u8").reshape(-1, len(_KEYS))
    return np.vecdot(words, _KEYS).astype("<u8").tobytes()


def _combine(parts: Iterable[_Sums]) -> BlobRef:
    digest, size = hashlib.sha256(), 0
    for sums, count in parts:
        digest.update(sums)
        size += count
    digest.update(size.to_bytes(8, "little"))
    return BlobRef(digest=Digest(digest.hexdigest()), bytes=size)


def _digest_as_earlier(handle: int, begins: Iterable[int], check: CheckInterrupt) -> BlobRef:
    digest, size = hashlib.blake2b(digest_size=_EARLIER_BYTES), 0
    for begin in begins:
        part = os.pread(handle, LEAF_BYTES, begin)
        digest.update(part)
        size += len(part)
        check()
    return BlobRef(digest=Digest(digest.hexdigest()), bytes=size)
