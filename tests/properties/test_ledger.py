"""The ledger accounts for every second of every worker, in runs with any faults."""

import msgspec
import pytest

from tests.simulation.walk import holds_of_every_walk
from tests.simulation.world import JOB, World
from tlt.report import Ledger, Snapshot
from tlt.report.duties import ALL_WORKERS, sum_by_duty
from tlt.store.journal import JournalEntry


def read_snapshot(world: World, by_worker: bool = True) -> Snapshot:
    ledger = Ledger(JOB, world.spec, by_worker)
    for line in world.journal:
        entry = msgspec.json.decode(line, type=JournalEntry)
        ledger.add(entry.event, entry.at)
    return ledger.snapshot()


@holds_of_every_walk
def test_seconds_by_duty_add_up_to_the_wall_clock(world: World) -> None:
    snapshot = read_snapshot(world)
    assert snapshot.status == "done"
    assert sum(account.seconds for account in snapshot.accounts) == pytest.approx(snapshot.seconds)
    assert sum(snapshot.phases.values()) == pytest.approx(snapshot.seconds)
    replaced = any(b'"WorkerReplaced"' in line for line in world.journal)
    forgets = replaced or world.spec.workers.asked is not None
    devices = 0.0
    for account in snapshot.accounts:
        for worker, duties in account.workers.items():
            seconds = sum(duties.values())
            if forgets:  # without those in which a worker may have served another job
                assert 0.0 <= seconds <= account.seconds + 1e-6
            else:
                assert seconds == pytest.approx(account.seconds)
            devices += world.ranks_ever[worker] * (seconds - duties.get("away", 0.0))
    assert snapshot.device_seconds == pytest.approx(devices)


@holds_of_every_walk
def test_sums_are_the_same_without_accounts_by_worker(world: World) -> None:
    each, all_ = read_snapshot(world), read_snapshot(world, by_worker=False)
    assert all_.workers == each.workers
    assert all_.device_seconds == each.device_seconds
    for one, other in zip(each.accounts, all_.accounts, strict=True):
        assert sum_by_duty(other.workers.values()) == pytest.approx(
            sum_by_duty(one.workers.values())
        )
    assert all(list(account.workers) == [ALL_WORKERS] for account in all_.accounts[:-1])


@holds_of_every_walk
def test_extra_answers_are_counted_once(world: World) -> None:
    algorithm, replaced = world.spec.algorithm, world.checks.sampling.replaced
    for step in read_snapshot(world).steps:
        extra = algorithm.group_size * len(replaced[step.step])
        assert step.replaced_groups == len(replaced[step.step])
        if world.spec.rollout.surplus(1):
            continue  # an answer may have been dropped in an earlier step
        assert step.rollouts + step.dropped == (
            algorithm.prompts_per_step * algorithm.group_size + extra
        )
        assert 0 <= step.extra_answers <= extra
        assert 0.0 <= step.extra_share <= 1.0
        plan = next(plan for plan in world.checks.plans.values() if plan.step == step.step)
        differing = {sample.prompt for sample in plan.samples}
        assert step.uniform_groups == algorithm.prompts_per_step + step.replaced_groups - len(
            differing
        )


@holds_of_every_walk
def test_every_trained_step_has_its_rollout(world: World) -> None:
    snapshot = read_snapshot(world)
    trained = [account for account in snapshot.accounts if account.rollout is not None]
    assert [account.step for account in trained] == [step.step for step in snapshot.steps]
    for account in trained:
        rollout = account.rollout
        assert rollout is not None
        assert 0 <= rollout.done_50 <= rollout.done_90 <= rollout.done_99 <= account.seconds
        assert 0 <= rollout.trained_share <= 1
        for worker, slots in rollout.slot_seconds.items():
            assert 0 <= rollout.empty_slot_seconds[worker] <= slots
    if snapshot.savings is not None:
        assert (snapshot.savings.total.high or 0.0) < 0.0 or not snapshot.gave_up
        saved = sum(a.savings.seconds for a in snapshot.accounts if a.savings is not None)
        assert saved == pytest.approx(snapshot.savings.total.seconds)
