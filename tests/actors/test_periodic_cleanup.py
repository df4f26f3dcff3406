"""Left-overs of ended jobs and workers are removed; what is in use stays."""

from pathlib import Path

import msgspec
import pytest

from tests.samples import JOB, SPEC
from tlt.actors.coordinator import periodic_cleanup
from tlt.actors.coordinator.periodic_cleanup import PeriodicCleanup
from tlt.actors.coordinator.redis_effects import Effects
from tlt.base.id_types import Incarnation, JobId, WorkerId
from tlt.base.log_rotation import bound_logs
from tlt.spec.config import SessionSpec
from tlt.store.job_requests import new_record
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import COORDINATOR, Keys
from tlt.store.worker_fence import FencePlace, admit

_W0, _W1 = WorkerId("w0"), WorkerId("w1")
_ENDED, _WAITING = JobId("job-0"), JobId("job-2")


async def _cleanup(folder: Path, connection: Connection, keys: Keys) -> PeriodicCleanup:
    spec = SessionSpec(
        name=keys.session,
        folder=str(folder / "session"),
        runs=str(folder / "runs"),
        flight=str(folder / "flight"),
        redis_url="unix:///unused",
    )
    effects = Effects(connection, keys)
    await effects.events.ensure_group(COORDINATOR)
    for job, status in ((_ENDED, "done"), (JOB, "cancelled"), (_WAITING, "queued")):
        record = new_record(job, SPEC, str(folder / "runs" / job))
        effects.records[job] = msgspec.structs.replace(record, status=status)
    return PeriodicCleanup(spec, effects)


async def test_removes_the_shared_memory_of_jobs_whose_end_is_committed(
    tmp_path: Path, connection: Connection, keys: Keys
) -> None:
    cleanup = await _cleanup(tmp_path, connection, keys)
    for name in (_ENDED, JOB, _WAITING, "unknown"):
        (tmp_path / "flight" / name / "states").mkdir(parents=True)
    (tmp_path / "flight" / "session").touch()
    await cleanup.run([JOB])
    left = {place.name for place in (tmp_path / "flight").iterdir()}
    assert left == {JOB, _WAITING, "unknown", "session"}
    await cleanup.run([])
    assert not (tmp_path / "flight" / JOB).exists()


async def test_deletes_the_commands_to_workers_that_are_over(
    tmp_path: Path, connection: Connection, keys: Keys
) -> None:
    cleanup = await _cleanup(tmp_path, connection, keys)
    streams = {
        (worker, number): keys.commands(worker, Incarnation(number))
        for worker, number in ((_W0, 1), (_W0, 7), (_W0, 12), (_W1, 2))
    }

    async def left() -> set[tuple[WorkerId, int]]:
        return {name for name, key in streams.items() if await connection.exists(key)}

    for key in streams.values():
        await connection.xadd(key, {"m": "1"})
    await admit(FencePlace(connection, keys, _W0, Incarnation(7)))
    await cleanup.run([])
    assert await left() == {(_W0, 7), (_W0, 12), (_W1, 2)}
    await admit(FencePlace(connection, keys, _W0, Incarnation(12)))
    await admit(FencePlace(connection, keys, _W1, Incarnation(3)))
    await cleanup.run([])
    assert await left() == {(_W0, 12)}


async def test_bounds_the_logs_of_the_running_job(
    tmp_path: Path, connection: Connection, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleanup = await _cleanup(tmp_path, connection, keys)
    logs = tmp_path / "runs" / JOB / "logs"
    engine = tmp_path / "flight" / JOB / "sglang-1"
    for folder in (logs, engine):
        folder.mkdir(parents=True)
        (folder / "sglang.log").write_bytes(b"12345")
    monkeypatch.setattr(periodic_cleanup, "bound_logs", lambda folder: bound_logs(folder, 4))
    await cleanup.run([JOB])
    for folder in (logs, engine):
        assert (folder / "sglang.log").read_bytes() == b""
        assert (folder / "sglang.log.1").read_bytes() == b"12345"
