"""Every listener reaches the full state, even if it reads slowly or returns late."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from tests.dashboard.runs import some_run, write_journal, write_run
from tests.dashboard.test_advice import step
from tests.simulation.walk import walk
from tests.simulation.world import JOB, World
from tlt.dashboard import broadcast, run_feed
from tlt.dashboard.page_sections import ROW_LISTS, Learning
from tlt.dashboard.row_deltas import row_delta
from tlt.dashboard.run_feed import RunFeed
from tlt.dashboard.run_fold import Run
from tlt.dashboard.sse import events
from tlt.dashboard.step_times import StepTimes
from tlt.report import Ledger, StepAccount
from tlt.runs.run_folder_reader import read_spec
from tlt.store.journal import JournalEntry


class Listener:
    """Fold received updates as the page does."""

    def __init__(self, feed: RunFeed, last_id: str | None = None) -> None:
        self._stream: AsyncGenerator[bytes] = events({"run": feed}, last_id)
        self.last_id = last_id
        self.full_states = 0
        self.known: dict[str, Any] = {}
        self.lanes: dict[str, list[Any]] = {"changes": [], "batches": [], "marks": []}
        self.log_lines: list[Any] = []

    async def receive(self) -> None:
        chunk = (await anext(self._stream)).decode()
        fields = dict(line.split(": ", 1) for line in chunk.strip().splitlines() if ": " in line)
        if "id" not in fields:
            return
        self.last_id = fields["id"]
        self.apply(msgspec.json.decode(fields["data"]))

    def apply(self, update: dict[str, Any]) -> None:
        if update.pop("full", False):
            self.full_states += 1
            self.known = {}
            self.lanes = {"changes": [], "batches": [], "marks": []}
            self.log_lines = []
        lanes = update.pop("lanes", None)
        for part in self.lanes:
            self.lanes[part] += [] if lanes is None else lanes[part]
        self.log_lines += update.pop("log_lines", [])
        for name, section in update.items():
            self.known[name] = self.apply_delta(name, section)

    def apply_delta(self, name: str, section: Any) -> Any:
        if name not in ROW_LISTS or section["since"] is None:
            return section
        before, since = self.known[name], section.pop("since")
        rows = {
            part: [*(row for row in before[part] if row["step"] < since), *section[part]]
            for part in ROW_LISTS[name]
        }
        return {**section, **rows, "since": None}

    async def receive_until(self, number: int) -> None:
        """Receive until the state covers `number` entries of the journal."""
        async with asyncio.timeout(20):
            while self.known.get("head", {}).get("entries") != number:
                await self.receive()

    async def leave(self) -> None:
        await self._stream.aclose()


@pytest.fixture
def world() -> World:
    return some_run(3)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_feed, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(run_feed, "SECTIONS_SECONDS", 0.0)
    monkeypatch.setattr(run_feed, "CORE_SHARE", 0)


def feed_of(folder: Path) -> RunFeed:
    return RunFeed(Run(folder, read_spec(folder)))


def assert_same(one: Listener, other: Listener) -> None:
    assert one.lanes == other.lanes
    assert one.log_lines == other.log_lines
    for section in ("head", "learning", "speculation", "times", "drafter", "attempts"):
        of_one, of_other = dict(one.known[section]), dict(other.known[section])
        of_one.pop("quiet_seconds", None)
        of_other.pop("quiet_seconds", None)
        assert of_one == of_other


async def test_following_a_growing_journal_reaches_the_full_state(
    world: World, tmp_path: Path
) -> None:
    count = len(world.journal)
    folder = write_run(world, tmp_path, count // 3)
    feed = feed_of(folder)
    listener = Listener(feed)
    for lines in (count // 3, count // 2, count):
        write_journal(world, folder, lines)
        await listener.receive_until(lines)
    late = Listener(feed)
    await late.receive_until(count)
    assert_same(listener, late)
    assert listener.full_states == 2  # before the journal was read, and after
    await listener.leave()
    await late.leave()
    await feed.stop()


async def test_returning_listener_receives_only_what_it_missed(
    world: World, tmp_path: Path
) -> None:
    count = len(world.journal)
    folder = write_run(world, tmp_path, count // 2)
    feed = feed_of(folder)
    stays, leaves = Listener(feed), Listener(feed)
    await stays.receive_until(count // 2)
    await leaves.receive_until(count // 2)
    await leaves.leave()
    write_journal(world, folder)
    await stays.receive_until(count)
    back = Listener(feed, leaves.last_id)
    back.known, back.lanes, back.log_lines = leaves.known, leaves.lanes, leaves.log_lines
    await back.receive_until(count)
    assert back.full_states == 0
    assert_same(back, stays)
    await stays.leave()
    await back.leave()
    await feed.stop()


async def test_sends_the_full_state_for_an_id_of_another_process(
    world: World, tmp_path: Path
) -> None:
    feed = feed_of(write_run(world, tmp_path))
    listener = Listener(feed, "cafe0123-3")
    await listener.receive_until(len(world.journal))
    assert listener.full_states
    await listener.leave()
    await feed.stop()


async def left_after(world: World, tmp_path: Path, lines: int) -> tuple[Path, RunFeed, Listener]:
    """Return a run, its feed, and a listener that left after so many entries."""
    folder = write_run(world, tmp_path, lines)
    feed = feed_of(folder)
    leaves = Listener(feed)
    await leaves.receive_until(lines)
    await leaves.leave()
    await feed.stop()
    return folder, feed, leaves


async def test_sends_the_full_state_for_an_id_of_a_feed_that_was_closed(
    world: World, tmp_path: Path
) -> None:
    """Message numbers start again, so an equal number is no evidence."""
    folder, feed, leaves = await left_after(world, tmp_path, 10)
    write_journal(world, folder)
    again = feed_of(folder)
    for _ in range(feed.broadcast.number):
        again.broadcast.publish(b"{}")
    back = Listener(again, leaves.last_id)
    await back.receive_until(len(world.journal))
    assert back.full_states
    await back.leave()
    await again.stop()


async def test_returning_listener_misses_nothing_after_a_single_request(
    world: World, tmp_path: Path
) -> None:
    """A single request discards the changes that it reads."""
    folder, feed, leaves = await left_after(world, tmp_path, 10)
    write_journal(world, folder)
    await feed.refresh()
    assert feed.run.new_log_lines == []
    assert feed.run.lanes.take_update().changes == ()
    back = Listener(feed, leaves.last_id)
    back.known, back.lanes, back.log_lines = leaves.known, leaves.lanes, leaves.log_lines
    await back.receive_until(len(world.journal))
    assert_same(back, full_listener(feed))
    await back.leave()
    await feed.stop()


async def test_shows_reading_progress_after_a_large_unread_backlog(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, feed, leaves = await left_after(world, tmp_path, 10)
    write_journal(world, folder)
    monkeypatch.setattr("tlt.dashboard.run_fold.LARGE_BACKLOG", 1)
    back = Listener(feed, leaves.last_id)
    await back.receive()
    await back.receive()
    assert back.full_states == 1
    assert 0.0 < back.known["reading"] < 1.0
    assert "head" not in back.known
    await back.receive_until(len(world.journal))
    assert_same(back, full_listener(feed))
    await back.leave()
    await feed.stop()


async def test_reports_a_failure_and_recovers(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(world.journal)
    folder = write_run(world, tmp_path, count // 2)
    feed = feed_of(folder)
    listener = Listener(feed)
    await listener.receive_until(count // 2)
    with monkeypatch.context() as broken:
        broken.setattr("tlt.dashboard.page_sections.head", lambda *_: 1 / 0)
        write_journal(world, folder)
        async with asyncio.timeout(20):
            while "ZeroDivisionError" not in (listener.known.get("broken") or ""):
                await listener.receive()
    await listener.receive_until(count)
    await listener.leave()
    await feed.stop()


async def test_slow_listener_receives_the_full_state_and_others_only_updates(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "HISTORY", 3)
    count = len(world.journal)
    folder = write_run(world, tmp_path, count // 4)
    feed = feed_of(folder)
    sleeper, listener = Listener(feed), Listener(feed)
    await sleeper.receive_until(count // 4)
    await listener.receive_until(count // 4)
    before = listener.full_states
    for lines in range(count // 4, count, max(1, count // 40)):
        write_journal(world, folder, lines)
        await listener.receive_until(lines)
    assert listener.full_states == before
    slept = sleeper.full_states
    await sleeper.receive_until(listener.known["head"]["entries"])
    assert sleeper.full_states == slept + 1
    assert_same(sleeper, listener)
    await sleeper.leave()
    await listener.leave()
    await feed.stop()


async def test_forgets_entries_that_were_removed(world: World, tmp_path: Path) -> None:
    """The successor of a coordinator that died before it committed removes these entries."""
    count = len(world.journal)
    folder = write_run(world, tmp_path, count)
    feed = feed_of(folder)
    listener = Listener(feed)
    await listener.receive_until(count)
    write_journal(world, folder, count // 2)
    await listener.receive_until(count // 2)
    fresh = feed_of(folder)
    late = Listener(fresh)
    await late.receive_until(count // 2)
    assert_same(listener, late)
    await listener.leave()
    await late.leave()
    await feed.stop()
    await fresh.stop()


async def test_reads_nothing_without_listeners(world: World, tmp_path: Path) -> None:
    folder = write_run(world, tmp_path, 10)
    feed = feed_of(folder)
    listener = Listener(feed)
    await listener.receive_until(10)
    await listener.leave()
    write_journal(world, folder)
    following = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.wait_for(asyncio.gather(*following), 5)
    assert feed.run.position.entries == 10


async def test_sends_finished_steps_once(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of a step doesn't grow with the length of the run."""
    received: list[dict[str, Any]] = []
    apply = Listener.apply

    def keep(listener: Listener, update: dict[str, Any]) -> None:
        received.append({name: dict(update[name]) for name in ROW_LISTS if name in update})
        apply(listener, update)

    monkeypatch.setattr(Listener, "apply", keep)
    count = len(world.journal)
    folder = write_run(world, tmp_path, 1)
    feed = feed_of(folder)
    listener = Listener(feed)
    for lines in range(1, count + 1, 10):
        write_journal(world, folder, lines)
        await listener.receive_until(lines)
    write_journal(world, folder)
    await listener.receive_until(count)
    steps = world.spec.algorithm.steps
    assert steps > 1
    sent = [
        step["step"] for update in received for step in update.get("learning", {}).get("steps", ())
    ]
    # once when its answers are finished, and once with its update
    assert all(sent.count(step) <= 2 for step in range(steps))
    assert_same(listener, full_listener(feed))
    await listener.leave()
    await feed.stop()


async def test_makes_no_sections_without_new_entries(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(world, tmp_path)
    feed = feed_of(folder)
    listener = Listener(feed)
    await listener.receive_until(len(world.journal))
    monkeypatch.setattr("tlt.dashboard.page_sections.sections", lambda *_: 1 / 0)
    monkeypatch.setattr("tlt.dashboard.page_sections.head", lambda *_: 1 / 0)
    number = feed.broadcast.number
    for _ in range(3):
        feed.full_state()
    assert feed.broadcast.number == number
    await listener.leave()
    await feed.stop()


def test_row_delta_has_only_changed_rows() -> None:
    def learning(rewards: list[float], first: int = 0, trained: float = 0.0) -> Learning:
        steps = tuple(step(step=first + n, reward=r) for n, r in enumerate(rewards))
        return Learning(
            prompts=1, steps=steps, evals=(), trained_share=trained, binary_rewards=True
        )

    def delta(before: Learning, now: Learning) -> tuple[int | None, list[float]] | None:
        found = row_delta(before, now, ROW_LISTS["learning"])
        return found and (found.since, [row.reward for row in found.steps])

    known = learning([0.1, 0.2, 0.3])
    assert row_delta(None, known, ROW_LISTS["learning"]) is known
    assert delta(known, learning([0.1, 0.2, 0.3])) is None
    assert delta(known, learning([0.1, 0.2, 0.3], trained=0.5)) == (3, [])
    assert delta(known, learning([0.1, 0.2, 0.4])) == (2, [0.4])
    assert delta(known, learning([0.1, 0.2, 0.3, 0.4])) == (3, [0.4])
    assert delta(known, learning([0.2, 0.3, 0.4], first=1)) == (3, [0.4])
    assert delta(known, learning([0.9, 0.2, 0.3])) == (0, [0.9, 0.2, 0.3])
    assert delta(learning([]), known) == (0, [0.1, 0.2, 0.3])


def test_renews_savings_of_earlier_steps_once_a_minute() -> None:
    times = StepTimes()
    assert times.start_refresh(0.0, False) == 0
    accounts = accounts_of(Random(2))
    times.replace(accounts)
    assert times.start_refresh(10.0, False) == accounts[-1].step
    assert [row.step for row in times.replace(accounts[-1:])] == [a.step for a in accounts]
    assert times.start_refresh(10.0, True) == 0
    assert times.start_refresh(61.0, False) == accounts[-1].step
    assert times.start_refresh(71.0, False) == 0


def accounts_of(chooser: Random) -> tuple[StepAccount, ...]:
    world = walk(chooser)
    ledger = Ledger(JOB, world.spec)
    for line in world.journal:
        entry = msgspec.json.decode(line, type=JournalEntry)
        ledger.add(entry.event, entry.at)
    return ledger.snapshot().accounts


def full_listener(feed: RunFeed) -> Listener:
    """Return a listener that came after everything was read."""
    listener = Listener(feed)
    listener.apply(msgspec.json.decode(feed.full_state()))
    return listener
