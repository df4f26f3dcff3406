"""A rank returns what a closed job had allocated, whether or not another one follows."""

import weakref
from pathlib import Path

import pytest
import torch

from tests.ranks.members import member_spec
from tests.ranks.ranks import INCARNATION, WORKER, local_rank, open_job
from tests.samples import JOB
from tlt.protocol.commands import CloseJob
from tlt.ranks.return_free_memory import return_memory_of_closed_job

_BLOCK, _BLOCKS = 100_000, 1000


class _Model:
    """An object that refers to itself, as models do, and holds small blocks."""

    def __init__(self) -> None:
        self.blocks = [b"x" * (_BLOCK + index) for index in range(_BLOCKS)]
        self.itself = self


@pytest.mark.skipif("not hasattr(__import__('ctypes').CDLL(None), 'malloc_trim')")
def test_returns_the_memory_of_a_model_that_refers_to_itself() -> None:
    model = _Model()
    # without it the end of the heap would be free, and returned by itself
    last = bytes(_BLOCK)
    before = _anonymous_bytes()
    del model
    return_memory_of_closed_job(torch.device("cpu"))
    assert before - _anonymous_bytes() > _BLOCK * _BLOCKS * 0.9
    assert len(last) == _BLOCK


def test_a_rank_keeps_nothing_of_a_closed_job(tmp_path: Path) -> None:
    with local_rank(tmp_path) as local:
        local.rank.handle(open_job(tmp_path, member_spec(tmp_path)))
        assert local.rank.duties is not None
        closed = weakref.ref(local.rank.duties)
        local.send(CloseJob(worker=WORKER, incarnation=INCARNATION, job=JOB))
        local.end()
        with pytest.raises(EOFError):
            local.rank.run()
        assert closed() is None


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such line")
