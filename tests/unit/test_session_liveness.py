"""The state of an actor comes from its process and its heartbeat's age, not from memory."""

import os
import subprocess
from pathlib import Path

import msgspec

from tlt.base.end_session_processes import ProcessId, identify
from tlt.base.id_types import Incarnation, WorkerId
from tlt.protocol.shared_values import Heartbeat, ServiceHeartbeat
from tlt.session.fault_log import Fault, FaultLog, Supervised, describe_fault, read_supervised
from tlt.session.session_process_states import Liveness, actor_liveness, supervised_liveness
from tlt.spec.config import SessionSpec

NOW = 1000.0
SPEC = SessionSpec(
    name="s", folder="/f", runs="/r", flight="/m", redis_url="unix:///x", workers=1, lease_seconds=8
)


def own() -> ProcessId:
    process = identify(os.getpid())
    assert process is not None
    return process


def beat(age: float = 0.0, ranks: tuple[int, ...] = ()) -> Heartbeat:
    return Heartbeat(
        incarnation=Incarnation(1),
        counter=1,
        progress=0,
        running=0,
        pid=own().pid,
        rank_pids=ranks,
        job=None,
        start_ticks=own().start_ticks,
        sent_at=NOW - age,
    )


def w0(heartbeat: Heartbeat | None, supervised: Supervised | None = None) -> Liveness:
    workers = {} if heartbeat is None else {WorkerId("w0"): heartbeat}
    *services, worker = actor_liveness(SPEC, {}, workers, supervised or Supervised(), NOW)
    assert [each.name for each in services] == ["coordinator", "reward"]
    return worker


def test_a_worker_is_up_while_it_beats_and_its_ranks_run() -> None:
    rank = subprocess.Popen(["sleep", "60"])
    assert w0(beat(3.9, (rank.pid,))) == Liveness(
        name="w0", state="up", pid=os.getpid(), silent_seconds=3.9, rank_pids=(rank.pid,)
    )
    assert w0(beat(4.1, (rank.pid,))).state == "silent"
    assert w0(beat(8.1, (rank.pid,))).state == "lost"
    rank.kill()
    rank.wait()
    ended = w0(beat(0.0, (rank.pid,)))
    assert (ended.state, ended.rank_pids) == ("restarting", ())
    assert w0(beat()).state == "starting"


def test_an_actor_whose_process_ended_is_restarting_however_fresh_its_heartbeat() -> None:
    reused = msgspec.structs.replace(beat(), start_ticks=own().start_ticks - 1)
    found = w0(reused)
    assert (found.state, found.pid, found.silent_seconds) == ("restarting", None, 0.0)


def test_an_actor_without_a_heartbeat_starts_or_is_restarted() -> None:
    assert w0(None).state == "starting"
    healing = Supervised(faults=(Fault(process="Ray's GCS", ended_at=NOW),))
    assert w0(None, healing).state == "restarting"
    services = {"reward": ServiceHeartbeat(pid=own().pid, start_ticks=0, sent_at=NOW)}
    states = [each.state for each in actor_liveness(SPEC, services, {}, Supervised(), NOW)]
    assert states == ["starting", "restarting", "starting"]


def test_supervised_processes_are_looked_up() -> None:
    ended = ProcessId(own().pid, own().start_ticks - 1)
    found = supervised_liveness(Supervised(processes={"Redis": own(), "Ray's raylet": ended}))
    assert [(each.name, each.state, each.pid) for each in found] == [
        ("Redis", "up", own().pid),
        ("Ray's raylet", "restarting", None),
    ]


def test_faults_are_kept_in_a_file_from_their_start_to_their_end(tmp_path: Path) -> None:
    assert read_supervised(tmp_path) == Supervised()
    log = FaultLog(tmp_path)
    fault = log.record_fault("Ray's raylet", NOW)
    assert describe_fault(fault, NOW + 4) == "Ray's raylet ended 4.0 s ago; starting again"
    failed = log.record_failure(log.record_retry(fault), "no port")
    assert read_supervised(tmp_path).healing == [failed]
    assert describe_fault(failed, NOW + 70).endswith("; starting again (try 1; no port)")
    log.record_recovery(failed, NOW + 90)
    (healed,) = read_supervised(tmp_path).recent(NOW + 690)
    assert describe_fault(healed, NOW + 100).endswith("; all worked again 1 min 30 s later")
    assert read_supervised(tmp_path).recent(NOW + 691) == []
    assert read_supervised(tmp_path).healing == []
    (tmp_path / "supervised.json").write_text("{]")
    assert read_supervised(tmp_path) == Supervised()
