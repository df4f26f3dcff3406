"""Every second of every worker is somewhere, whatever happened to the run."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.walk import walk
from tests.simulation.world import JOB, World
from tlt.report import Ledger, Snapshot
from tlt.report.time_by_duty import EVERYBODY, summed
from tlt.store.journal import JournalEntry

_EXAMPLES = settings().max_examples


def told(world: World, by_worker: bool = True) -> Snapshot:
    ledger = Ledger(JOB, world.spec, by_worker)
    for line in world.journal:
        entry = msgspec.json.decode(line, type=JournalEntry)
        ledger.add(entry.event, entry.at)
    return ledger.snapshot()


@settings(max_examples=_EXAMPLES)
@given(seed=st.integers(0, 2**32 - 1))
def test_seconds_by_duty_add_up_to_the_wall_clock(seed: int) -> None:
    world = walk(Random(seed))
    snapshot = told(world)
    assert snapshot.status == "done"
    assert sum(account.seconds for account in snapshot.accounts) == pytest.approx(snapshot.seconds)
    assert sum(snapshot.phases.values()) == pytest.approx(snapshot.seconds)
    devices = 0.0
    for account in snapshot.accounts:
        for worker, duties in account.workers.items():
            assert sum(duties.values()) == pytest.approx(account.seconds)
            devices += world.ranks[worker] * (account.seconds - duties.get("away", 0.0))
    assert snapshot.device_seconds == pytest.approx(devices)


@settings(max_examples=_EXAMPLES // 3)
@given(seed=st.integers(0, 2**32 - 1))
def test_who_keeps_no_worker_of_a_step_tells_the_same_in_all(seed: int) -> None:
    world = walk(Random(seed))
    each, all_ = told(world), told(world, by_worker=False)
    assert all_.workers == each.workers
    assert all_.device_seconds == each.device_seconds
    for one, other in zip(each.accounts, all_.accounts, strict=True):
        assert summed(other.workers.values()) == pytest.approx(summed(one.workers.values()))
    assert all(list(account.workers) == [EVERYBODY] for account in all_.accounts[:-1])


@settings(max_examples=_EXAMPLES // 2)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_step_tells_of_its_rollouts(seed: int) -> None:
    snapshot = told(walk(Random(seed)))
    trained = [account for account in snapshot.accounts if account.rollout is not None]
    assert [account.step for account in trained] == [step.step for step in snapshot.steps]
    for account in trained:
        rollout = account.rollout
        assert rollout is not None
        assert 0 <= rollout.done_50 <= rollout.done_90 <= rollout.done_99 <= account.seconds
        assert 0 <= rollout.trained <= 1
        for worker, there in rollout.slots.items():
            assert 0 <= rollout.empty[worker] <= there
    if snapshot.saved is not None:
        assert (snapshot.saved.total.high or 0.0) < 0.0 or not snapshot.gave_up
        in_all = sum(a.saved.seconds for a in snapshot.accounts if a.saved is not None)
        assert in_all == pytest.approx(snapshot.saved.total.seconds)
