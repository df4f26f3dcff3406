"""Invariant: a lease ends when the observer's clock has seen no new heartbeat for its length."""

from tlt.actors.coordinator.lease_expiry import Leases
from tlt.base.id_types import Incarnation, WorkerId
from tlt.protocol.events import WorkerLost
from tlt.protocol.shared_values import Heartbeat

WORKER, OTHER = WorkerId("worker-0"), WorkerId("worker-1")


def beat(counter: int, incarnation: int = 1) -> Heartbeat:
    return Heartbeat(
        incarnation=Incarnation(incarnation),
        counter=counter,
        progress=0,
        running=0,
        pid=1,
        rank_pids=(),
        job=None,
    )


def test_reports_a_silent_worker_once() -> None:
    leases = Leases(10.0)
    assert leases.observe({WORKER: beat(7)}, 100.0) == []
    assert leases.observe({WORKER: beat(7)}, 110.0) == []
    (lost,) = leases.observe({WORKER: beat(7)}, 110.5)
    assert lost == WorkerLost(
        worker=WORKER,
        incarnation=Incarnation(1),
        reason="no heartbeat for 10 s",
        returning=False,
    )
    assert leases.observe({WORKER: beat(7)}, 200.0) == []


def test_renews_the_lease_at_every_new_counter() -> None:
    leases = Leases(10.0)
    for now, counter in [(0.0, 5), (9.0, 6), (18.0, 1), (27.0, 2), (37.0, 2)]:
        assert leases.observe({WORKER: beat(counter)}, now) == []
    assert len(leases.observe({WORKER: beat(2)}, 37.5)) == 1


def test_spares_workers_that_beat_while_the_observer_slept() -> None:
    leases = Leases(10.0)
    leases.observe({WORKER: beat(1), OTHER: beat(1)}, 0.0)
    (lost,) = leases.observe({WORKER: beat(2), OTHER: beat(1)}, 1000.0)
    assert lost.worker == OTHER


def test_counts_no_time_in_which_no_worker_could_be_heard() -> None:
    leases = Leases(10.0)
    leases.observe({WORKER: beat(1)}, 0.0)
    leases.skip(1000.0)
    assert leases.observe({WORKER: beat(1)}, 1009.0) == []
    assert len(leases.observe({WORKER: beat(1)}, 1010.5)) == 1


def test_reports_a_worker_again_after_it_returned() -> None:
    leases = Leases(10.0)
    leases.observe({WORKER: beat(1)}, 0.0)
    assert len(leases.observe({WORKER: beat(1)}, 11.0)) == 1
    assert leases.observe({WORKER: beat(2)}, 12.0) == []
    assert len(leases.observe({WORKER: beat(2)}, 23.0)) == 1


def test_gives_a_new_incarnation_its_own_lease() -> None:
    leases = Leases(10.0)
    leases.observe({WORKER: beat(1)}, 0.0)
    leases.observe({WORKER: beat(1)}, 11.0)
    assert leases.observe({WORKER: beat(1, incarnation=2)}, 12.0) == []
    (lost,) = leases.observe({WORKER: beat(1, incarnation=2)}, 23.0)
    assert lost.incarnation == 2


def test_starts_the_lease_at_the_first_observation() -> None:
    assert Leases(10.0).observe({WORKER: beat(1)}, 1e9) == []
