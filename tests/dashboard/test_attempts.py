"""Neither the attempts of a job nor the incarnations of a worker overlap."""

from itertools import pairwise
from random import Random

import msgspec
import pytest

from tests.simulation.walk import holds_of_every_walk, walk
from tests.simulation.world import JOB, World
from tlt.protocol.commands import StartJob
from tlt.protocol.events import SessionResumed, WorkerLost
from tlt.report import Attempts, Ledger, Transition
from tlt.store.journal import JournalEntry


def folded(world: World) -> tuple[Ledger, Attempts, list[JournalEntry]]:
    entries = [msgspec.json.decode(line, type=JournalEntry) for line in world.journal]
    ledger, attempts, began = Ledger(JOB, world.spec), Attempts(), 0.0
    for entry in entries:
        if isinstance(entry.event, StartJob):
            began = entry.at
        attempts.add(ledger.add(entry.event, entry.at), entry.at - began)
    return ledger, attempts, entries


@holds_of_every_walk
def test_attempts_follow_each_other(world: World) -> None:
    ledger, attempts, entries = folded(world)
    listed = attempts.attempts
    epochs = {e.event.epoch for e in entries if isinstance(e.event, StartJob | SessionResumed)}
    # a coordinator that started after the job's end has no attempt
    epochs = {epoch for epoch in epochs if epoch <= ledger.state.epoch}
    assert {each.epoch for each in listed} == epochs
    assert len(listed) == len(epochs)
    for one, following in pairwise(listed):
        assert one.ended is not None
        assert one.began <= one.ended <= following.began
        assert one.step <= following.step
    assert listed[-1].end == "the job ended"
    assert listed[-1].epoch == ledger.state.epoch


@holds_of_every_walk
def test_incarnations_of_a_worker_follow_each_other(world: World) -> None:
    ledger, attempts, entries = folded(world)
    incarnations = attempts.incarnations()
    reasons = {e.event.reason for e in entries if isinstance(e.event, WorkerLost)}
    for worker in ledger.state.newest_incarnations:
        own = sorted(
            (incarnation for incarnation in incarnations if incarnation.worker == worker),
            key=lambda e: e.incarnation,
        )
        for one, following in pairwise(own):
            assert one.ended is not None
            assert one.ended <= following.began
        over = [incarnation for incarnation in own if incarnation.ended is not None]
        assert all(
            incarnation.end in reasons or "took its place" in str(incarnation.end)
            for incarnation in over
        )
        going = own[len(over) :]
        known = ledger.state.workers.get(worker)
        if known is not None and going:
            assert going[-1].incarnation == known.info.incarnation


@pytest.mark.parametrize(("kept", "why"), [(True, "started again"), (False, "session restarted")])
def test_says_why_an_attempt_began(kept: bool, why: str) -> None:
    ledger, attempts, _ = folded(walk(Random(7)))
    state = ledger.state
    resumed = SessionResumed(epoch=state.epoch, blobs_kept=kept)
    before = msgspec.structs.replace(state, epoch=-1)
    attempts.add(Transition(before=before, event=resumed, after=state, commands=(), at=99.0), 99.0)
    assert why in attempts.attempts[-1].why
    assert attempts.attempts[-1].began == 99.0
