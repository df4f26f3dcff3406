"""Tell which processes of a session live, from heartbeats and from the host's list of processes.

Of workers in a cluster, which may be on other hosts, only the heartbeats tell.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from tlt.base.end_session_processes import ProcessId, is_child, is_running
from tlt.base.id_types import WorkerId
from tlt.protocol.shared_values import Heartbeat, ServiceHeartbeat
from tlt.session.fault_log import Supervised
from tlt.spec.config import SessionSpec
from tlt.store.heartbeats import SERVICES

# lost: the process runs, but sent nothing for a lease; silent: for half of one
State = Literal["up", "starting", "restarting", "silent", "lost"]


class Liveness(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: State
    # None: there is none at the moment
    pid: int | None = None
    # since its last heartbeat; None for processes that send none
    silent_seconds: float | None = None
    rank_pids: tuple[int, ...] = ()
    # address of its host, if the session has several
    host: str = ""


def supervised_liveness(supervised: Supervised) -> Iterator[Liveness]:
    for name, process in supervised.processes.items():
        runs = is_running(process)
        yield Liveness(
            name=name, state="up" if runs else "restarting", pid=process.pid if runs else None
        )


def actor_liveness(
    spec: SessionSpec,
    services: Mapping[str, ServiceHeartbeat],
    workers: Mapping[WorkerId, Heartbeat],
    supervised: Supervised,
    now: float,
) -> Iterator[Liveness]:
    """Yield the actors that the session should have; `now` is the time of the host's clock."""
    missing: State = "restarting" if supervised.healing else "starting"
    for name in actor_names(spec):
        worker = workers.get(WorkerId(name))
        beat = services.get(name) if worker is None else worker
        if beat is None:
            yield Liveness(name=name, state=missing)
        elif not _may_run(spec, beat):
            yield Liveness(name=name, state="restarting", silent_seconds=_age(beat, now))
        else:
            yield Liveness(
                name=name,
                state=_state(spec, beat, now),
                pid=beat.pid,
                silent_seconds=_age(beat, now),
                rank_pids=() if worker is None else _running_ranks(spec, worker),
                host=beat.host if isinstance(beat, Heartbeat) and spec.cluster else "",
            )


def actor_names(spec: SessionSpec) -> list[str]:
    return [*SERVICES, *(f"w{index}" for index in range(spec.workers))]


def _state(spec: SessionSpec, beat: Heartbeat | ServiceHeartbeat, now: float) -> State:
    """Return the state of an actor whose process runs."""
    age = _age(beat, now)
    if age > spec.lease_seconds:
        return "lost"
    if age > spec.lease_seconds / 2:
        return "silent"
    if isinstance(beat, Heartbeat):
        if not beat.rank_pids:
            return "starting"
        if len(_running_ranks(spec, beat)) < len(beat.rank_pids):
            return "restarting"
    return "up"


def _may_run(spec: SessionSpec, beat: Heartbeat | ServiceHeartbeat) -> bool:
    """Return False if an actor has ended; of other hosts only its heartbeats tell."""
    is_elsewhere = spec.cluster is not None and isinstance(beat, Heartbeat)
    return is_elsewhere or is_running(ProcessId(beat.pid, beat.start_ticks))


def _running_ranks(spec: SessionSpec, beat: Heartbeat) -> tuple[int, ...]:
    if spec.cluster is not None:
        return beat.rank_pids
    return tuple(pid for pid in beat.rank_pids if is_child(pid, beat.pid))


def _age(beat: Heartbeat | ServiceHeartbeat, now: float) -> float:
    return round(max(0.0, now - beat.sent_at), 1)
