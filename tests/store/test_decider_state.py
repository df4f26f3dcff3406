"""Invariant: snapshot and journal give the state that the decisions led to."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.samples import SPEC
from tlt.base.id_types import Epoch, Incarnation, JobId, WorkerId
from tlt.errors import JournalError
from tlt.policies.session.job_queue import SessionState, decide
from tlt.protocol.commands import CancelJob, Command, EndJob
from tlt.protocol.events import (
    AnyEvent,
    JobPrepared,
    JobSubmitted,
    SessionEvent,
    SessionResumed,
    WorkerJoined,
    WorkerLost,
)
from tlt.protocol.shared_values import Prepared, WorkerInfo
from tlt.store.journal import FILE_NAME, START, Position
from tlt.store.journal_replayed_state import SNAPSHOT_FILE, DeciderState, Snapshot, replay

Decider = DeciderState[SessionState]
SNAPSHOT_ENTRIES = 7


def _events(jobs: int) -> list[AnyEvent]:
    """Return the events of jobs that run, end and are cancelled while workers join and die."""
    events: list[AnyEvent] = [SessionResumed(epoch=Epoch(1), blobs_kept=False)]
    for number in range(jobs):
        job, worker = JobId(f"job-{number}"), WorkerId(f"worker-{number % 3}")
        info = WorkerInfo(
            worker=worker, incarnation=Incarnation(number), ranks=1, host="h", rendezvous="h:1"
        )
        events += [
            WorkerJoined(info=info),
            JobSubmitted(job=job, spec=SPEC, folder="/runs"),
            JobPrepared(job=job, prepared=Prepared(train_prompts=8, eval_prompts=number)),
            CancelJob(job=JobId(f"job-{number - 1}")),
            EndJob(job=job, status="done", error=None)
            if number % 3
            else WorkerLost(
                worker=worker, incarnation=Incarnation(number), reason="dead", returning=False
            ),
        ]
    return events


def _open(folder: Path, committed: Position) -> Decider:
    return DeciderState(folder, committed, SessionState(), decide, SNAPSHOT_ENTRIES)


def _consume(decider: Decider, events: Sequence[AnyEvent], batch: int = 3) -> Position:
    for start in range(0, len(events), batch):
        for number, event in enumerate(events[start : start + batch], start):
            decider.decide(event, float(number))
        decider.write()
        decider.snapshot_if_due()
    return decider.journal.position


def _state_after(events: Sequence[AnyEvent]) -> SessionState:
    state = SessionState()
    for number, event in enumerate(events):
        state, _ = decide(state, event, float(number))  # pyright: ignore[reportArgumentType]
    return state


def _assert_rebuilds(folder: Path, committed: Position, events: Sequence[AnyEvent]) -> None:
    decider = _open(folder, committed)
    assert decider.state == _state_after(events)
    decider.close()


def test_rebuilds_the_state_that_decisions_led_to(tmp_path: Path) -> None:
    events = _events(12)
    committed = START
    for start in range(0, len(events), 11):
        decider = _open(tmp_path, committed)
        assert decider.state == _state_after(events[:start])
        for number, event in enumerate(events[start : start + 11], start):
            decider.decide(event, float(number))
        committed = decider.write()
        decider.snapshot_if_due()
        decider.close()
    decider = _open(tmp_path, committed)
    assert decider.state == _state_after(events)
    assert decider.state.jobs
    assert decider.state.workers
    decider.close()
    state, position = replay(tmp_path / FILE_NAME, SessionState(), decide)
    assert (state, position) == (_state_after(events), committed)


def test_reads_no_entries_before_the_snapshot(tmp_path: Path) -> None:
    events = _events(8)
    decider = _open(tmp_path, START)
    committed = _consume(decider, events)
    decider.close()
    at = _snapshot(tmp_path).position
    assert committed.entries - SNAPSHOT_ENTRIES <= at.entries <= committed.entries
    path = tmp_path / FILE_NAME
    path.write_bytes(b"#" * at.bytes + path.read_bytes()[at.bytes :])
    _assert_rebuilds(tmp_path, committed, events)


def test_writes_no_snapshot_before_it_is_due(tmp_path: Path) -> None:
    events = _events(3)
    decider = _open(tmp_path, START)
    _consume(decider, events[: SNAPSHOT_ENTRIES - 1])
    assert not (tmp_path / SNAPSHOT_FILE).exists()
    _consume(decider, events[SNAPSHOT_ENTRIES - 1 : SNAPSHOT_ENTRIES])
    assert _snapshot(tmp_path).position == decider.journal.position
    decider.close()


@pytest.mark.parametrize("damaged", [b"", b"\x81", b"\xc0"])
def test_replays_the_journal_if_the_snapshot_is_damaged(damaged: bytes, tmp_path: Path) -> None:
    events = _events(8)
    decider = _open(tmp_path, START)
    committed = _consume(decider, events)
    decider.close()
    (tmp_path / SNAPSHOT_FILE).write_bytes(damaged)
    _assert_rebuilds(tmp_path, committed, events)


def test_replays_the_journal_if_a_byte_of_the_snapshot_has_changed(tmp_path: Path) -> None:
    events = _events(8)
    decider = _open(tmp_path, START)
    committed = _consume(decider, events)
    decider.close()
    whole = (tmp_path / SNAPSHOT_FILE).read_bytes()
    for place in range(0, len(whole), len(whole) // 20):
        damaged = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        (tmp_path / SNAPSHOT_FILE).write_bytes(damaged)
        _assert_rebuilds(tmp_path, committed, events)


def test_replays_the_journal_if_the_snapshot_has_another_schema(tmp_path: Path) -> None:
    events = _events(8)
    decider = _open(tmp_path, START)
    committed = _consume(decider, events)
    decider.close()
    wrong = msgspec.Raw(msgspec.msgpack.encode(SessionState()))
    older = msgspec.structs.replace(_snapshot(tmp_path), schema=1, state=wrong)
    (tmp_path / SNAPSHOT_FILE).write_bytes(msgspec.msgpack.encode(older))
    _assert_rebuilds(tmp_path, committed, events)


def test_ignores_a_snapshot_ahead_of_the_committed_position(tmp_path: Path) -> None:
    events = _events(8)
    decider = _open(tmp_path, START)
    earlier = _consume(decider, events[:5])
    _consume(decider, events[5:])
    decider.close()
    _assert_rebuilds(tmp_path, earlier, events[:5])


def test_goes_on_if_a_snapshot_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / ".snapshot-unfinished").mkdir()
    events = _events(8)
    decider = _open(tmp_path, START)
    committed = _consume(decider, events)
    decider.close()
    _assert_rebuilds(tmp_path, committed, events)


def test_forgets_decisions_that_were_not_written(tmp_path: Path) -> None:
    events = _events(2)
    decider = _open(tmp_path, START)
    committed = _consume(decider, events[:4])
    decider.decide(events[4], 4.0)
    decider.close()
    _assert_rebuilds(tmp_path, committed, events[:4])


def test_refuses_a_journal_whose_commands_have_changed(tmp_path: Path) -> None:
    decider = DeciderState(tmp_path, START, SessionState(), decide)
    committed = _consume(decider, _events(2))
    decider.close()

    def other(
        state: SessionState, event: SessionEvent, now: float
    ) -> tuple[SessionState, Sequence[Command]]:
        state, commands = decide(state, event, now)
        return state, commands[:1]

    with pytest.raises(JournalError, match="entry 2 gives other commands than it did"):
        DeciderState(tmp_path, committed, SessionState(), other)


def test_refuses_a_journal_that_ends_elsewhere(tmp_path: Path) -> None:
    decider = _open(tmp_path, START)
    committed = _consume(decider, _events(2))
    decider.close()
    wrong = msgspec.structs.replace(committed, entries=committed.entries + 1)
    with pytest.raises(JournalError, match=r"read, .* were committed"):
        _open(tmp_path, wrong)


def _snapshot(folder: Path) -> Snapshot:
    return msgspec.msgpack.decode((folder / SNAPSHOT_FILE).read_bytes(), type=Snapshot)
