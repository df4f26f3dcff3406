"""Whoever listens knows the whole, however slowly it listens, and whenever it comes back."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.dashboard.runs import some_run, write_journal, write_run
from tests.simulation.world import World
from tlt.dashboard import channel, run_feed
from tlt.dashboard.events import events
from tlt.dashboard.run import Run, read_spec
from tlt.dashboard.run_feed import RunFeed
from tlt.dashboard.tail import Holding


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
        self.known |= update

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


def feed_of(folder: Path) -> RunFeed:
    return RunFeed(Run(folder, read_spec(folder)), Holding, followed=False)


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
    listener = Listener(feed, "cafe0123.run-3")
    await listener.hear_until(len(world.journal))
    assert listener.wholes
    await listener.leave()
    await feed.stop()


async def test_a_sleeper_is_told_the_whole_and_costs_nobody_else(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_PAST", 3)
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


def told_whole(feed: RunFeed) -> Listener:
    """As a listener who comes once everything was read."""
    feed._ready = True
    return told(feed)
