"""Whoever listens knows the whole, however slowly it listens, and whenever it comes back."""

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
from tlt.dashboard.page_sections import GROWING, Learning
from tlt.dashboard.row_deltas import news
from tlt.dashboard.run_feed import RunFeed
from tlt.dashboard.run_fold import Run, read_spec
from tlt.dashboard.sse import events
from tlt.dashboard.step_times import StepTimes
from tlt.report import Ledger, StepAccount
from tlt.store.journal import JournalEntry


class Listener:
    """Folds what it is told, as the page does."""

    def __init__(self, feed: RunFeed, last_id: str | None = None) -> None:
        self._stream: AsyncGenerator[bytes] = events({"run": feed}, last_id)
        self.last_id = last_id
        self.wholes = 0
        self.known: dict[str, Any] = {}
        self.lanes: dict[str, list[Any]] = {"changes": [], "batches": [], "marks": []}
        self.lines: list[Any] = []

    async def hear(self) -> None:
        chunk = (await anext(self._stream)).decode()
        fields = dict(line.split(": ", 1) for line in chunk.strip().splitlines() if ": " in line)
        if "id" not in fields:
            return
        self.last_id = fields["id"]
        self.apply(msgspec.json.decode(fields["data"]))

    def apply(self, update: dict[str, Any]) -> None:
        if update.pop("whole", False):
            self.wholes += 1
            self.known = {}
            self.lanes = {"changes": [], "batches": [], "marks": []}
            self.lines = []
        news = update.pop("lanes", None)
        for part in self.lanes:
            self.lanes[part] += [] if news is None else news[part]
        self.lines += update.pop("lines", [])
        for name, section in update.items():
            self.known[name] = self.grown(name, section)

    def grown(self, name: str, section: Any) -> Any:
        if name not in GROWING or section["since"] is None:
            return section
        before, since = self.known[name], section.pop("since")
        rows = {
            part: [*(row for row in before[part] if row["step"] < since), *section[part]]
            for part in GROWING[name]
        }
        return {**section, **rows, "since": None}

    async def hear_until(self, number: int) -> None:
        """Until the journal has been told so far."""
        async with asyncio.timeout(20):
            while self.known.get("head", {}).get("entries") != number:
                await self.hear()

    async def leave(self) -> None:
        await self._stream.aclose()


@pytest.fixture
def world() -> World:
    return some_run(3)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_feed, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(run_feed, "_SECTIONS_SECONDS", 0.0)
    monkeypatch.setattr(run_feed, "_SHARE", 0)


def feed_of(folder: Path) -> RunFeed:
    return RunFeed(Run(folder, read_spec(folder)), lambda: None, followed=lambda: False)


def told(feed: RunFeed) -> Listener:
    listener = Listener(feed)
    listener.apply(msgspec.json.decode(feed.whole()))
    return listener


def same(one: Listener, other: Listener) -> None:
    assert one.lanes == other.lanes
    assert one.lines == other.lines
    for section in ("head", "learning", "speculation", "times", "drafter", "attempts"):
        told_one, told_other = dict(one.known[section]), dict(other.known[section])
        told_one.pop("quiet", None)
        told_other.pop("quiet", None)
        assert told_one == told_other


async def test_following_a_growing_journal_comes_to_the_whole(world: World, tmp_path: Path) -> None:
    count = len(world.journal)
    folder = write_run(world, tmp_path, count // 3)
    feed = feed_of(folder)
    listener = Listener(feed)
    for lines in (count // 3, count // 2, count):
        write_journal(world, folder, lines)
        await listener.hear_until(lines)
    late = Listener(feed)
    await late.hear_until(count)
    same(listener, late)
    assert listener.wholes == 2  # before the journal was read, and then
    await listener.leave()
    await late.leave()
    await feed.stop()


async def test_who_comes_back_is_told_the_rest_alone(world: World, tmp_path: Path) -> None:
    count = len(world.journal)
    folder = write_run(world, tmp_path, count // 2)
    feed = feed_of(folder)
    stays, leaves = Listener(feed), Listener(feed)
    await stays.hear_until(count // 2)
    await leaves.hear_until(count // 2)
    await leaves.leave()
    write_journal(world, folder)
    await stays.hear_until(count)
    back = Listener(feed, leaves.last_id)
    back.known, back.lanes, back.lines = leaves.known, leaves.lanes, leaves.lines
    await back.hear_until(count)
    assert back.wholes == 0
    same(back, stays)
    await stays.leave()
    await back.leave()
    await feed.stop()


async def test_another_process_tells_the_whole(world: World, tmp_path: Path) -> None:
    feed = feed_of(write_run(world, tmp_path))
    listener = Listener(feed, "cafe0123-3")
    await listener.hear_until(len(world.journal))
    assert listener.wholes
    await listener.leave()
    await feed.stop()


async def left_after(world: World, tmp_path: Path, lines: int) -> tuple[Path, RunFeed, Listener]:
    """A run, and who heard so much of it and went."""
    folder = write_run(world, tmp_path, lines)
    feed = feed_of(folder)
    leaves = Listener(feed)
    await leaves.hear_until(lines)
    await leaves.leave()
    await feed.stop()
    return folder, feed, leaves


async def test_a_feed_that_was_closed_and_opened_again_tells_the_whole(
    world: World, tmp_path: Path
) -> None:
    """Its numbers begin again, and say nothing of those before."""
    folder, feed, leaves = await left_after(world, tmp_path, 10)
    write_journal(world, folder)
    again = feed_of(folder)
    for _ in range(feed.channel.number):
        again.channel.publish(b"{}")
    back = Listener(again, leaves.last_id)
    await back.hear_until(len(world.journal))
    assert back.wholes
    await back.leave()
    await again.stop()


async def test_who_was_away_while_somebody_asked_once_misses_nothing(
    world: World, tmp_path: Path
) -> None:
    """What nobody listens to is not kept, neither for who asks once."""
    folder, feed, leaves = await left_after(world, tmp_path, 10)
    write_journal(world, folder)
    await feed.refresh()
    assert feed.run.new_lines == []
    assert feed.run.lanes.news().changes == ()
    back = Listener(feed, leaves.last_id)
    back.known, back.lanes, back.lines = leaves.known, leaves.lanes, leaves.lines
    await back.hear_until(len(world.journal))
    same(back, told_whole(feed))
    await back.leave()
    await feed.stop()


async def test_who_returns_to_much_that_nobody_read_is_not_told_what_was(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, feed, leaves = await left_after(world, tmp_path, 10)
    write_journal(world, folder)
    monkeypatch.setattr("tlt.dashboard.run_fold._MUCH", 1)
    back = Listener(feed, leaves.last_id)
    await back.hear()
    await back.hear()
    assert back.wholes == 1
    assert 0.0 < back.known["reading"] < 1.0
    assert "head" not in back.known
    await back.hear_until(len(world.journal))
    same(back, told_whole(feed))
    await back.leave()
    await feed.stop()


async def test_whatever_fails_in_telling_is_told(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(world.journal)
    folder = write_run(world, tmp_path, count // 2)
    feed = feed_of(folder)
    listener = Listener(feed)
    await listener.hear_until(count // 2)
    with monkeypatch.context() as broken:
        broken.setattr("tlt.dashboard.page_sections.head", lambda *_: 1 / 0)
        write_journal(world, folder)
        async with asyncio.timeout(20):
            while "ZeroDivisionError" not in (listener.known.get("broken") or ""):
                await listener.hear()
    await listener.hear_until(count)
    await listener.leave()
    await feed.stop()


async def test_a_sleeper_is_told_the_whole_and_costs_nobody_else(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "_PAST", 3)
    count = len(world.journal)
    folder = write_run(world, tmp_path, count // 4)
    feed = feed_of(folder)
    sleeper, listener = Listener(feed), Listener(feed)
    await sleeper.hear_until(count // 4)
    await listener.hear_until(count // 4)
    before = listener.wholes
    for lines in range(count // 4, count, max(1, count // 40)):
        write_journal(world, folder, lines)
        await listener.hear_until(lines)
    assert listener.wholes == before
    slept = sleeper.wholes
    await sleeper.hear_until(listener.known["head"]["entries"])
    assert sleeper.wholes == slept + 1
    same(sleeper, listener)
    await sleeper.leave()
    await listener.leave()
    await feed.stop()


async def test_what_was_taken_back_is_forgotten(world: World, tmp_path: Path) -> None:
    """A coordinator that died before it committed is followed by one that decides again."""
    count = len(world.journal)
    folder = write_run(world, tmp_path, count)
    feed = feed_of(folder)
    listener = Listener(feed)
    await listener.hear_until(count)
    write_journal(world, folder, count // 2)
    await listener.hear_until(count // 2)
    fresh = feed_of(folder)
    while fresh.run.advance(1.0):
        pass
    same(listener, told_whole(fresh))
    await listener.leave()
    await feed.stop()


async def test_nobody_listens_and_nothing_is_read(world: World, tmp_path: Path) -> None:
    folder = write_run(world, tmp_path, 10)
    feed = feed_of(folder)
    listener = Listener(feed)
    await listener.hear_until(10)
    await listener.leave()
    write_journal(world, folder)
    assert feed._task is not None
    await asyncio.wait_for(feed._task, 5)
    assert feed.run.position.entries == 10


async def test_steps_that_are_over_are_told_once(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a run, a step costs its listeners what it did at its beginning."""
    told: list[dict[str, Any]] = []
    apply = Listener.apply

    def keep(listener: Listener, update: dict[str, Any]) -> None:
        told.append({name: dict(update[name]) for name in GROWING if name in update})
        apply(listener, update)

    monkeypatch.setattr(Listener, "apply", keep)
    count = len(world.journal)
    folder = write_run(world, tmp_path, 1)
    feed = feed_of(folder)
    listener = Listener(feed)
    for lines in range(1, count + 1, 10):
        write_journal(world, folder, lines)
        await listener.hear_until(lines)
    write_journal(world, folder)
    await listener.hear_until(count)
    steps = world.spec.algorithm.steps
    assert steps > 1
    sent = [step["step"] for update in told for step in update.get("learning", {}).get("steps", ())]
    # as its answers are there, and with its update
    assert all(sent.count(step) <= 2 for step in range(steps))
    same(listener, told_whole(feed))
    await listener.leave()
    await feed.stop()


async def test_nothing_is_made_where_nothing_happens(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(world, tmp_path)
    feed = feed_of(folder)
    listener = Listener(feed)
    await listener.hear_until(len(world.journal))
    monkeypatch.setattr("tlt.dashboard.page_sections.sections", lambda *_: 1 / 0)
    monkeypatch.setattr("tlt.dashboard.page_sections.head", lambda *_: 1 / 0)
    for _ in range(3):
        assert feed._changed() == {}
    await listener.leave()
    await feed.stop()


def test_rows_alone_are_told_that_are_not_as_before() -> None:
    def learning(rewards: list[float], first: int = 0, trained: float = 0.0) -> Learning:
        steps = tuple(step(step=first + n, reward=r) for n, r in enumerate(rewards))
        return Learning(prompts=1, steps=steps, evals=(), trained=trained, right_or_wrong=True)

    def told(before: Learning, now: Learning) -> tuple[int | None, list[float]] | None:
        found = news(before, now, GROWING["learning"])
        return found and (found.since, [row.reward for row in found.steps])

    known = learning([0.1, 0.2, 0.3])
    assert news(None, known, GROWING["learning"]) is known
    assert told(known, learning([0.1, 0.2, 0.3])) is None
    assert told(known, learning([0.1, 0.2, 0.3], trained=0.5)) == (3, [])
    assert told(known, learning([0.1, 0.2, 0.4])) == (2, [0.4])
    assert told(known, learning([0.1, 0.2, 0.3, 0.4])) == (3, [0.4])
    assert told(known, learning([0.2, 0.3, 0.4], first=1)) == (3, [0.4])
    assert told(known, learning([0.9, 0.2, 0.3])) == (0, [0.9, 0.2, 0.3])
    assert told(learning([]), known) == (0, [0.1, 0.2, 0.3])


def test_what_was_saved_in_earlier_steps_is_looked_at_once_a_minute() -> None:
    times = StepTimes()
    assert times.since(0.0, False) == 0
    accounts = told_of(Random(2))
    times.learn(accounts)
    assert times.since(10.0, False) == accounts[-1].step
    assert [row.step for row in times.learn(accounts[-1:])] == [a.step for a in accounts]
    assert times.since(10.0, True) == 0
    assert times.since(61.0, False) == accounts[-1].step
    assert times.since(71.0, False) == 0


def told_of(chooser: Random) -> tuple[StepAccount, ...]:
    world = walk(chooser)
    ledger = Ledger(JOB, world.spec)
    for line in world.journal:
        entry = msgspec.json.decode(line, type=JournalEntry)
        ledger.add(entry.event, entry.at)
    return ledger.snapshot().accounts


def told_whole(feed: RunFeed) -> Listener:
    """As a listener who comes once everything was read."""
    feed._ready = True
    return told(feed)
