"""Warnings are ordered by urgency, and each says what to do."""

from random import Random

import msgspec

from tests.simulation.specs import small_spec
from tests.simulation.walk import walk
from tests.simulation.world import JOB
from tlt.base.id_types import Incarnation, Step, WorkerId
from tlt.dashboard.recent_errors import RecentError, RecentErrors
from tlt.dashboard.session_health import Health, StreamHealth, WorkerHealth
from tlt.dashboard.warnings_and_remedies import (
    Urgency,
    advice_on_run,
    advice_on_session,
    by_urgency,
)
from tlt.protocol.shared_values import UpdateMetrics
from tlt.report import Ledger, Snapshot, StepSummary
from tlt.report.batch_lengths_and_finish_times import LengthSummary
from tlt.session.fault_log import Fault
from tlt.store.journal import JournalEntry


def snapshot(**changes: object) -> Snapshot:
    return msgspec.structs.replace(Ledger(JOB, small_spec()).snapshot(), **changes)


def step(**changes: object) -> StepSummary:
    common = StepSummary(
        step=Step(0),
        reward=0.5,
        rollouts=8,
        dropped=0,
        unscored=0,
        uniform_groups=0,
        tokens=100,
        length=LengthSummary(),
        truncated=0.0,
        rollout_seconds=1.0,
    )
    return msgspec.structs.replace(common, **changes)


def metrics(**changes: float) -> UpdateMetrics:
    common = UpdateMetrics(
        loss=0.1,
        gradient_norm=0.1,
        learning_rate=1e-6,
        entropy=0.5,
        clipped_low=0.0,
        clipped_high=0.0,
        sampling_kl=0.0,
        reference_kl=None,
        importance_truncated=0.0,
        tokens=100,
        samples=8,
        optimiser_steps=1,
        skipped_steps=0,
    )
    return msgspec.structs.replace(common, **changes)


def worker(name: str, silent: float = 0.0, ranks: int = 1) -> WorkerHealth:
    return WorkerHealth(
        worker=WorkerId(name),
        incarnation=Incarnation(1),
        ranks=ranks,
        running=0,
        job=None,
        silent_seconds=silent,
        memory_bytes=0,
        pid=1,
    )


def test_no_advice_on_a_healthy_run_and_session() -> None:
    assert list(advice_on_run(snapshot(steps=(step(metrics=metrics()),)), 4, [], 0.0, {})) == []
    assert list(advice_on_session(Health(lease_seconds=15.0, workers=(worker("w0"),)))) == []


def test_most_urgent_advice_comes_first() -> None:
    odd = step(truncated=0.9, unscored=3, uniform_groups=4, metrics=metrics(skipped_steps=1))
    odd = msgspec.structs.replace(odd, retractions=5)
    lost = [RecentError(at=1.0, kind="lost", worker=WorkerId(name)) for name in ("w10", "w2")]
    seen = snapshot(steps=(odd,), gave_up=True)
    advice = by_urgency(advice_on_run(seen, 4, lost, 500.0, {"wandb": "no key"}))
    assert any(
        "wandb has failed and is not called any more: no key" in one.problem for one in advice
    )
    assert [one.urgency for one in advice] == sorted(one.urgency for one in advice)
    text = " ".join(one.problem for one in advice)
    assert "lost 2 times in ten minutes (w2, w10)" in text
    for part in (
        "1 of 2 optimiser steps of the last update were skipped",
        "not scored",
        "hit the token limit",
        "equal rewards",
        "SGLang retracted answers 5 times in step 0 for lack of memory",
        "paused",
    ):
        assert part in text
    assert advice[0].urgency is Urgency.NOW
    assert advice[-1].urgency is Urgency.NOTE
    assert all(one.remedy for one in advice)


def test_does_not_warn_of_errors_an_hour_ago() -> None:
    world = walk(Random(2))
    errors, ledger, last = RecentErrors(), Ledger(JOB, world.spec), 0.0
    for line in world.journal:
        entry = msgspec.json.decode(line, type=JournalEntry)
        before = ledger.state
        ledger.add(entry.event, entry.at)
        errors.add(before, entry.event, ledger.state, entry.at)
        last = entry.at
    lost = [error for error in errors.recent(last) if error.kind == "lost"]
    assert len(lost) == ledger.state.losses > 0
    assert errors.recent(last + 3600) == []


def test_silent_worker_without_a_rank_is_not_reported_as_starting() -> None:
    fresh, gone = worker("w0", ranks=0), worker("w1", silent=12.0, ranks=0)
    health = Health(lease_seconds=15.0, workers=(fresh, gone), silent=1, rankless=1)
    starting = [one.problem for one in advice_on_session(health) if "no rank" in one.problem]
    assert starting == ["w0 has no rank: new ranks are starting."]


def test_many_silent_workers_give_one_warning() -> None:
    silent = tuple(worker(f"w{number}", silent=12.0) for number in range(128))
    [advice] = advice_on_session(Health(lease_seconds=15.0, workers=silent, silent=900))
    assert advice.problem == "w0, w1, w2 and 897 more have sent no heartbeat for 12.0 s."
    assert advice.urgency is Urgency.NOW


def test_only_old_events_are_a_backlog() -> None:
    """Old prompts are the tail, and healthy."""
    old = {"group": "g", "depth": 9, "oldest_seconds": 60.0}
    healthy = Health(lease_seconds=15.0, streams=(StreamHealth(name="prompts", **old),))
    assert list(advice_on_session(healthy)) == []
    late = Health(lease_seconds=15.0, streams=(StreamHealth(name="events", **old),))
    assert [one.urgency for one in advice_on_session(late)] == [Urgency.SOON]


def test_faults_of_the_session_are_reported_while_they_heal_and_for_a_while_after() -> None:
    raylet = Fault(process="Ray's raylet", ended_at=100.0, tries=1)
    (now,) = advice_on_session(Health(), faults=[raylet], now=104.0)
    assert now.urgency is Urgency.NOW
    assert now.problem == "Ray's raylet ended 4.0 s ago; starting again."
    healed = msgspec.structs.replace(raylet, healed_at=112.0)
    redis = Fault(process="Redis", ended_at=120.0, healed_at=120.5)
    (after,) = advice_on_session(Health(), faults=[healed, redis], now=125.0)
    assert after.urgency is Urgency.SOON
    assert after.problem == (
        "Redis ended 5.0 s ago; all worked again 0.5 s later. 2 such faults in ten minutes."
    )
    first, _ = advice_on_session(Health(error="refused"), faults=[raylet], now=104.0)
    assert first == now
