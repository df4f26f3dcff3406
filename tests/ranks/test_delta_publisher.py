"""Deltas are published after enough work, and publications don't take much of the time."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.ranks.ranks import rank_job
from tests.trainer.drafters import learner
from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.base.interrupt_check import Interrupted, never_interrupt
from tlt.protocol.refs import DrafterBase
from tlt.ranks.drafter.delta_publisher import DeltaPublisher, MicroBatch
from tlt.ranks.drafter.merged_delta_tracker import DeltaTracker

FIRST = DrafterVersion(0)


@pytest.fixture
def publisher(tmp_path: Path) -> DeltaPublisher:
    job = rank_job(tmp_path)
    return DeltaPublisher(job, job.blobs(), base_bytes=1000)


@pytest.fixture
def tracker() -> DeltaTracker:
    found = DeltaTracker("1.0", learner("eagle"))
    base = DrafterBase(version=FIRST, root=FIRST, weights=None, updates=0, micro_batches=0)
    found.move_to(base, found.root)
    return found


def add(publisher: DeltaPublisher, *seconds: float) -> None:
    for taken in seconds:
        publisher.add(MicroBatch(seconds=taken, loss=2.0, tokens=[("own", 3), ("others", 1)]))


def publish_within(
    seconds: float, publisher: DeltaPublisher, tracker: DeltaTracker, patch: pytest.MonkeyPatch
) -> None:
    """Publish once, on a clock that advances by `seconds` meanwhile."""

    def ticks() -> Iterator[float]:
        yield 0.0
        while True:
            yield seconds

    clock = ticks()
    with patch.context() as context:
        fake = SimpleNamespace(monotonic=lambda: next(clock))
        context.setattr("tlt.ranks.drafter.delta_publisher.time", fake)
        publisher.publish(tracker, 1, PolicyVersion(0), 0.1, never_interrupt)


@pytest.mark.parametrize(
    ("seconds", "publishing", "due"),
    [
        ([], None, False),
        ([0.1] * 7, None, False),
        ([0.1] * 8, None, True),
        ([0.05] * 8, None, False),
        ([2.5], None, False),
        # few long micro-batches must show soon whether they help
        ([2.5] * 2, None, True),
        ([2.5] * 2, 1.0, False),
        ([2.5] * 8, 1.0, True),
    ],
)
def test_is_due_after_enough_work(
    publisher: DeltaPublisher,
    tracker: DeltaTracker,
    monkeypatch: pytest.MonkeyPatch,
    seconds: list[float],
    publishing: float | None,
    due: bool,
) -> None:
    if publishing is not None:
        add(publisher, 0.1)
        publish_within(publishing, publisher, tracker, monkeypatch)
    add(publisher, *seconds)
    assert publisher.is_due is due


def test_a_stop_waits_for_small_drafters_only(
    publisher: DeltaPublisher, tracker: DeltaTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert publisher.is_quick
    assert not DeltaPublisher(rank_job(Path("/")), rank_job(Path("/")).blobs(), 10**8).is_quick
    add(publisher, 0.1)
    publish_within(0.06, publisher, tracker, monkeypatch)
    assert not publisher.is_quick


def test_a_stop_waits_for_a_large_drafter_if_that_is_a_small_share_of_the_work(
    publisher: DeltaPublisher, tracker: DeltaTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(publisher, 0.1)
    publish_within(0.1, publisher, tracker, monkeypatch)
    add(publisher, 1.5)
    assert not publisher.is_quick
    add(publisher, 1.5)
    assert publisher.is_quick
    assert not publisher.is_due


def test_reports_what_was_learned_since_the_last_delta(
    publisher: DeltaPublisher, tracker: DeltaTracker
) -> None:
    add(publisher, 1.0, 3.0)
    publisher.add_reading(0.25)
    first = publisher.publish(tracker, 7, PolicyVersion(2), 0.1, never_interrupt)
    assert (first.training_session, first.policy, first.updates) == (7, 2, 2)
    assert (first.seconds, first.longest_seconds, first.reading_seconds) == (4.0, 3.0, 0.25)
    assert (first.loss, first.tokens.own, first.tokens.others) == (2.0, 6, 2)
    add(publisher, 0.5)
    second = publisher.publish(tracker, 7, PolicyVersion(2), 0.1, never_interrupt)
    assert (second.updates, second.seconds, second.reading_seconds) == (1, 0.5, 0.0)
    assert [first.delta.number, second.delta.number] == [0, 1]


def test_is_interrupted_a_few_times_only(publisher: DeltaPublisher, tracker: DeltaTracker) -> None:
    add(publisher, 10.0)

    def interrupt() -> None:
        raise Interrupted

    for _ in range(8):
        with pytest.raises(Interrupted):
            publisher.publish(
                tracker, 1, PolicyVersion(0), 0.1, publisher.limit_interrupts(interrupt)
            )
    check = publisher.limit_interrupts(interrupt)
    assert publisher.publish(tracker, 1, PolicyVersion(0), 0.1, check).updates == 1
