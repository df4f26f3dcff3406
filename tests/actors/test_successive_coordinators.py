"""The coordinator that began last commits, and one that began earlier ends."""

import asyncio
from pathlib import Path

import pytest

from tests.actors.test_startup_event_backlog import Session, consume, end, post
from tests.samples import JOB
from tests.waiting import wait_until
from tlt.actors.coordinator.deciders import SESSION
from tlt.actors.coordinator.event_batch_committer import Superseded
from tlt.store.heartbeats import read_services


async def test_an_earlier_coordinator_commits_nothing_and_the_later_one_waits_for_its_end(
    redis_url: str, tmp_path: Path
) -> None:
    session = Session(tmp_path, redis_url)
    first, second = session.coordinator(), session.coordinator()
    await first.recover()
    before = await first.effects.committed(SESSION)
    recovery = asyncio.create_task(second.recover())
    await wait_until(lambda: second.lock is not None)
    await post(first, session.begin())
    with pytest.raises(Superseded, match="epoch 1 is over"):
        await consume(first)
    assert await first.effects.committed(SESSION) == before
    assert not recovery.done()
    await end(first)
    await recovery
    # it has cut off what the first one had written, and decided the same events
    assert second.deciders.session.state.jobs[JOB].status == "running"
    await end(second)
    third = session.coordinator()
    await third.recover()
    assert third.deciders.session.state.jobs[JOB].status == "running"
    await end(third)


async def test_an_idle_coordinator_notices_that_it_is_superseded(
    redis_url: str, tmp_path: Path
) -> None:
    session = Session(tmp_path, redis_url)
    begun = session.coordinator()
    await begun.recover()
    await post(begun, session.begin())
    await consume(begun)
    await end(begun)
    first, second = session.coordinator(), session.coordinator()
    running = asyncio.create_task(first.run())
    await wait_until(lambda: read_services(first.effects.connection, first.effects.keys))
    recovery = asyncio.create_task(second.recover())
    with pytest.raises(Superseded):
        await running
    await end(first)
    await recovery
    await end(second)
