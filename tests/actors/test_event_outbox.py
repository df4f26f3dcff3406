"""An answer is on the disk before anybody hears of it."""

import asyncio
import errno
import os
import threading
from pathlib import Path

import msgspec
import pytest

from tests.samples import JOB, answer, written_answer
from tests.waiting import wait_until
from tlt.actors.run_until_one_fails import IncarnationEnded
from tlt.actors.worker.event_outbox import Outbox
from tlt.actors.worker.worker_context import IncarnationSetup
from tlt.base.id_types import Incarnation, JobId, WorkerId
from tlt.blobs.answer_files import AnswerFiles
from tlt.protocol.commands import PauseJob
from tlt.protocol.events import RolloutFinished, WorkerLost
from tlt.store import worker_fence
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import Keys

_LOST = WorkerLost(worker=WorkerId("w0"), incarnation=Incarnation(1), reason="test", returning=True)


async def _outbox(connection: Connection, keys: Keys, run: Path) -> Outbox:
    setup = IncarnationSetup(
        connection=connection, keys=keys, worker=WorkerId("w0"), incarnation=Incarnation(1)
    )
    await worker_fence.admit(setup.fence)
    outbox = Outbox(setup)
    outbox.open(JOB, run)
    return outbox


def _written(run: Path) -> RolloutFinished:
    ref = AnswerFiles(run).writer("1.0").append(written_answer([7]))
    return msgspec.structs.replace(answer(0), answer=ref)


async def test_sends_an_answer_once_it_is_on_the_disk(
    connection: Connection, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = await _outbox(connection, keys, tmp_path)
    syncing, synced = threading.Event(), threading.Event()

    def fsync(_: int) -> None:
        syncing.set()
        assert synced.wait(20)

    monkeypatch.setattr(os, "fsync", fsync)
    outbox.post(_written(tmp_path))
    sending = asyncio.create_task(outbox.flush())
    await wait_until(syncing.is_set)
    assert await connection.xlen(keys.events) == 0
    synced.set()
    await sending
    assert await connection.xlen(keys.events) == 1


async def test_does_not_report_an_answer_that_is_lost(
    connection: Connection, keys: Keys, tmp_path: Path
) -> None:
    """The worker still reports its end, which returns the prompt to the queue."""
    outbox = await _outbox(connection, keys, tmp_path)
    outbox.post(_written(tmp_path))
    (tmp_path / "answers" / "1.0").unlink()
    with pytest.raises(IncarnationEnded, match=r"1\.0: cannot be read"):
        await outbox.flush()
    outbox.post(_LOST)
    await outbox.flush()
    ((_, fields),) = await connection.xrange(keys.events)
    assert outbox.events.codec.decode(fields) == _LOST


async def test_pauses_a_job_whose_disk_is_full(
    connection: Connection, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = await _outbox(connection, keys, tmp_path)

    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    outbox.post(_written(tmp_path))
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(IncarnationEnded, match="No space left"):
        await outbox.flush()
    await outbox.flush()
    ((_, fields),) = await connection.xrange(keys.events)
    pause = outbox.events.codec.decode(fields)
    assert isinstance(pause, PauseJob)
    assert pause.job == JOB
    assert "No space left on device. Free" in (pause.shortage or "")


async def test_sends_the_last_answers_of_a_job_that_was_closed(
    connection: Connection, keys: Keys, tmp_path: Path
) -> None:
    outbox = await _outbox(connection, keys, tmp_path / "first")
    outbox.post(_written(tmp_path / "first"))
    outbox.open(JobId("second"), tmp_path / "second")
    await outbox.flush()
    assert await connection.xlen(keys.events) == 1
