"""Kill processes of a session, or stop them for longer than a lease."""

from tests.chaos.fault import Chaos, Fault, Healed, NotNow, hold, kill, stopped
from tests.chaos.session import until
from tlt.base.end_session_processes import processes_of
from tlt.base.id_types import WorkerId
from tlt.protocol.shared_values import Heartbeat


def _kill_rank(chaos: Chaos) -> Healed:
    worker, beat = chaos.dice.choice(_with_ranks(chaos))
    kill(*beat.rank_pids)
    return _next_incarnation(chaos, worker, beat.incarnation)


def _kill_worker(chaos: Chaos) -> Healed:
    worker, beat = chaos.dice.choice(_with_ranks(chaos))
    kill(beat.pid)
    return _next_incarnation(chaos, worker, beat.incarnation)


def _kill_service(name: str) -> Fault:
    def inject(chaos: Chaos) -> Healed:
        before = chaos.session.services()[name].pid
        kill(before)
        return lambda: chaos.session.services()[name].pid != before

    return inject


def _kill_rewards_child(chaos: Chaos) -> Healed:
    """Kill the process that loads the reward, and those that it has forked."""
    if not (children := chaos.session.named("tlt.rewards.process.reward_fork_server")):
        raise NotNow("no process scores")
    kill(chaos.dice.choice(children))
    return None


def _kill_preparer(chaos: Chaos) -> Healed:
    """Kill the process that prepares jobs; the next job starts another."""
    if not (preparers := chaos.session.named("tlt.preparation.prepare_job")):
        raise NotNow("no job was prepared since the last one was killed")
    kill(*preparers)
    return None


def _kill_logger(chaos: Chaos) -> Healed:
    """Kill a logger; it is started again with the next coordinator, and no answer needs it."""
    if not (loggers := chaos.session.named("tlt.loggers.main")):
        raise NotNow("no logger runs")
    kill(*loggers)
    return None


def _kill_dashboard(chaos: Chaos) -> Healed:
    """Kill the page's server, which `tlt up` has started; the next `tlt up` starts it again."""
    if not (servers := chaos.session.named("dashboard")):
        raise NotNow("no dashboard runs")
    kill(*servers)
    return None


def _kill_supervised(name: str) -> Fault:
    def inject(chaos: Chaos) -> Healed:
        before = chaos.session.supervised().processes[name]
        kill(before.pid)
        return lambda: chaos.session.supervised().processes.get(name) not in (None, before)

    return inject


def _kill_supervisor(chaos: Chaos) -> Healed:
    kill(chaos.session.supervised().processes["supervisor"].pid)
    _up_again(chaos)
    return None


def _kill_everything(chaos: Chaos) -> Healed:
    supervised = chaos.session.supervised().processes.values()
    kill(*(process.pid for process in supervised), *processes_of(chaos.session.folder))
    _up_again(chaos)
    return None


def _up_again(chaos: Chaos) -> None:
    chaos.free()
    chaos.session.up()


def _stop_worker(chaos: Chaos) -> Healed:
    worker, beat = chaos.dice.choice(_with_ranks(chaos))
    with stopped(beat.pid):
        until(lambda: _fence(chaos, worker) > beat.incarnation, "the lease to end")
    return _next_incarnation(chaos, worker, beat.incarnation)


def _stop_rank(chaos: Chaos) -> Healed:
    _, beat = chaos.dice.choice(_with_ranks(chaos))
    with stopped(*beat.rank_pids):
        hold(chaos.session.lease_seconds * 1.5)
    return None


def _stop_service(name: str) -> Fault:
    def inject(chaos: Chaos) -> Healed:
        with stopped(chaos.session.services()[name].pid):
            hold(chaos.session.lease_seconds * 1.5)
        return None

    return inject


def _stop_redis(chaos: Chaos) -> Healed:
    with stopped(chaos.session.supervised().processes["Redis"].pid):
        hold(chaos.session.lease_seconds * 1.5)
    return None


def _with_ranks(chaos: Chaos) -> list[tuple[WorkerId, Heartbeat]]:
    found = [(worker, beat) for worker, beat in chaos.session.workers().items() if beat.rank_pids]
    if not found:
        raise NotNow("no worker has ranks")
    return found


def _next_incarnation(chaos: Chaos, worker: WorkerId, number: int) -> Healed:
    def healed() -> bool:
        beat = chaos.session.workers()[worker]
        return beat.incarnation > number and bool(beat.rank_pids)

    return healed


def _fence(chaos: Chaos, worker: WorkerId) -> int:
    return int(chaos.session.redis.hget(chaos.session.keys.fence, worker) or 0)


KILLS: dict[str, Fault] = {
    "kill a rank": _kill_rank,
    "kill a worker": _kill_worker,
    "kill the coordinator": _kill_service("coordinator"),
    "kill the reward scorer": _kill_service("reward"),
    "kill the reward's child": _kill_rewards_child,
    "kill the preparer of jobs": _kill_preparer,
    "kill a logger": _kill_logger,
    "kill the dashboard": _kill_dashboard,
    "kill Redis": _kill_supervised("Redis"),
    "kill Ray's raylet": _kill_supervised("Ray's raylet"),
    "kill Ray's GCS": _kill_supervised("Ray's GCS"),
    "kill Ray's driver": _kill_supervised("Ray's driver"),
    "kill the supervisor, then `tlt up`": _kill_supervisor,
    "kill everything, then `tlt up`": _kill_everything,
}
STOPS: dict[str, Fault] = {
    "stop a worker past its lease": _stop_worker,
    "stop a rank for 1.5 leases": _stop_rank,
    "stop the coordinator for 1.5 leases": _stop_service("coordinator"),
    "stop the reward scorer for 1.5 leases": _stop_service("reward"),
    "stop Redis for 1.5 leases": _stop_redis,
}
