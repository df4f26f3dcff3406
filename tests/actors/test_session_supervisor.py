"""A supervisor outlasts a disk that is full for a while."""

from pathlib import Path

import pytest

from tlt.actors.supervisor.session_supervisor import SessionSupervisor
from tlt.base.end_session_processes import ProcessId
from tlt.session.fault_log import FaultLog, read_supervised
from tlt.session.session_files import write_session
from tlt.spec.config import SessionSpec
from tlt.store.embedded_redis import EmbeddedRedis


def test_starts_redis_as_often_as_it_takes(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlt.actors.supervisor.session_supervisor._REDIS_PAUSE_SECONDS", 0.0)
    folder = tmp_path / "session"
    folder.mkdir()
    spec = SessionSpec(
        name="supervised",
        folder=str(folder),
        runs=str(tmp_path / "runs"),
        flight=str(tmp_path / "flight"),
        redis_url=f"unix://{short_folder}/redis.sock",
    )
    write_session(spec)
    supervisor = SessionSupervisor(folder)
    data = tmp_path / "data"
    data.touch()  # a file, where Redis needs a folder
    supervisor.redis = EmbeddedRedis(data, short_folder / "redis.sock")
    for _ in range(3):
        supervisor.heal_redis()
    (fault,) = read_supervised(folder).faults
    assert fault.tries == 3
    assert fault.healed_at is None
    assert "cannot be made" in (fault.error or "")
    data.unlink()
    try:
        supervisor.heal_redis()
        assert supervisor.redis.running
        (fault,) = read_supervised(folder).faults
        assert fault.healed_at is not None
    finally:
        supervisor.redis.stop()


def test_writes_faults_once_it_can(tmp_path: Path) -> None:
    folder = tmp_path / "full"
    faults = FaultLog(folder)
    process = {"Redis": ProcessId(pid=1, start_ticks=2)}
    faults.watch(process)
    fault = faults.record_fault("Redis", 0.0)
    faults.record_recovery(fault, 1.0)
    folder.mkdir()
    faults.watch(process)
    (written,) = read_supervised(folder).faults
    assert written.healed_at == 1.0
