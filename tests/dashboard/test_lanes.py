"""Lanes agree with the ledger, send every change once and bound their history."""

from collections import defaultdict
from itertools import pairwise
from random import Random

import msgspec
import pytest

from tests.simulation.walk import holds_of_every_walk, walk
from tests.simulation.world import JOB, World
from tlt.base.id_types import WorkerId
from tlt.protocol.commands import StartJob
from tlt.report import Ledger, WorkerLanes
from tlt.report.duties import AWAY
from tlt.report.worker_lanes import OVER, LaneUpdate
from tlt.store.journal import JournalEntry


def folded(world: World, **bounds: int) -> tuple[Ledger, WorkerLanes, list[LaneUpdate]]:
    ledger, lanes, updates = Ledger(JOB, world.spec), WorkerLanes(**bounds), list[LaneUpdate]()
    began = 0.0
    for number, line in enumerate(world.journal):
        entry = msgspec.json.decode(line, type=JournalEntry)
        if isinstance(entry.event, StartJob):
            began = entry.at
        lanes.add(ledger.add(entry.event, entry.at), entry.at - began)
        if number % 7 == 0:
            updates.append(lanes.take_update())
    return ledger, lanes, [*updates, lanes.take_update()]


@holds_of_every_walk
def test_changes_add_up_to_the_ledgers_seconds(world: World) -> None:
    ledger, lanes, _ = folded(world)
    spent: defaultdict[tuple[str, str], float] = defaultdict(float)
    for worker in lanes.duties():
        changes = lanes.lane(worker)
        assert changes[-1].duty == OVER
        for change, following in pairwise(changes):
            spent[worker, change.duty] += following.at - change.at
    for worker, duties in ledger.snapshot().workers.items():
        for duty, seconds in duties.items():
            if duty != AWAY:  # the ledger counts a late worker as away since the start of the step
                assert spent[worker, duty] == pytest.approx(seconds)


@holds_of_every_walk
def test_updates_add_up_to_the_full_state(world: World) -> None:
    _, lanes, updates = folded(world)
    whole = lanes.all()
    for part in ("changes", "batches"):
        bits = [bit for update in updates for bit in getattr(update, part)]
        assert sorted(bits, key=lambda bit: bit.worker) == list(getattr(whole, part))
    assert [mark for update in updates for mark in update.marks] == list(whole.marks)
    assert [update.names for update in updates if update.names][-1] == whole.names
    # names are sent again only with a new worker
    counts = [len(update.names) for update in updates if update.names]
    assert counts == sorted(set(counts))


def test_history_of_many_workers_is_bounded() -> None:
    _, lanes, _ = folded(walk(Random(5)), entries=40)
    most = max(16, 40 // len(lanes.duties()))
    assert all(len(lanes.lane(worker)) <= most for worker in lanes.duties())
    assert all(lanes.lane(worker)[-1].duty == OVER for worker in lanes.duties())


def test_names_the_lanes_that_dropped_changes() -> None:
    """A busy lane drops only its own changes, and a lane that began late has dropped none."""
    lanes, calm, busy, late = (
        WorkerLanes(entries=40),
        WorkerId("w0"),
        WorkerId("w1"),
        WorkerId("w2"),
    )
    lanes.change_duty(calm, "rollout", 0.0)
    for number in range(20):
        lanes.change_duty(busy, ("rollout", "policy_update")[number % 2], float(number))
    lanes.change_duty(late, "idle", 50.0)
    assert lanes.all().forgotten == ()
    lanes.change_duty(busy, "rollout", 60.0)
    assert lanes.all().forgotten == (1,)
    assert lanes.lane(busy)[0].at == 1.0
    assert lanes.take_update().forgotten == ()


def test_strategy_marks_do_not_displace_others() -> None:
    """Strategies change many times a step."""
    lanes = WorkerLanes(marks=5)
    lanes.mark("step", None, "step 0", 0.0)
    for number in range(20):
        lanes.mark("strategy", None, f"{number}", 1.0 + number)
    lanes.mark("lost", None, "lost", 9.0)
    updates = [(mark.kind, mark.text) for mark in lanes.all().marks]
    assert updates == [
        ("step", "step 0"),
        *(("strategy", f"{number}") for number in range(15, 20)),
        ("lost", "lost"),
    ]
