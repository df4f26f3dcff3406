"""Invariant: a lease ends when the observer's own clock has seen no new pulse for its time."""

from tlt.actors.leases import Leases
from tlt.ids import Incarnation, WorkerId
from tlt.protocol.records import Heartbeat

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


def test_lease_ends_once_after_the_silence() -> None:
    leases = Leases(10.0)
    assert leases.observe({WORKER: beat(7)}, 100.0) == []
    assert leases.observe({WORKER: beat(7)}, 110.0) == []
    (lost,) = leases.observe({WORKER: beat(7)}, 110.5)
    assert (lost.worker, lost.incarnation, lost.silent_seconds) == (WORKER, 1, 10.5)
    assert leases.observe({WORKER: beat(7)}, 200.0) == []


def test_every_new_counter_renews_it_even_a_smaller_one() -> None:
    leases = Leases(10.0)
    for now, counter in [(0.0, 5), (9.0, 6), (18.0, 1), (27.0, 2), (37.0, 2)]:
        assert leases.observe({WORKER: beat(counter)}, now) == []
    assert len(leases.observe({WORKER: beat(2)}, 37.5)) == 1


def test_observer_that_slept_blames_nobody_who_beat_meanwhile() -> None:
    leases = Leases(10.0)
    leases.observe({WORKER: beat(1), OTHER: beat(1)}, 0.0)
    (lost,) = leases.observe({WORKER: beat(2), OTHER: beat(1)}, 1000.0)
    assert lost.worker == OTHER


def test_worker_that_came_back_can_be_lost_again() -> None:
    leases = Leases(10.0)
    leases.observe({WORKER: beat(1)}, 0.0)
    assert len(leases.observe({WORKER: beat(1)}, 11.0)) == 1
    assert leases.observe({WORKER: beat(2)}, 12.0) == []
    assert len(leases.observe({WORKER: beat(2)}, 23.0)) == 1


def test_new_incarnation_that_counts_alike_has_a_lease_of_its_own() -> None:
    leases = Leases(10.0)
    leases.observe({WORKER: beat(1)}, 0.0)
    leases.observe({WORKER: beat(1)}, 11.0)
    assert leases.observe({WORKER: beat(1, incarnation=2)}, 12.0) == []
    (lost,) = leases.observe({WORKER: beat(1, incarnation=2)}, 23.0)
    assert lost.incarnation == 2


def test_first_sight_is_never_late() -> None:
    assert Leases(10.0).observe({WORKER: beat(1)}, 1e9) == []
