"""Invariant: snapshot plus journal give the state that the decisions led to, whoever reads them."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.samples import SPEC
from tlt.errors import JournalError
from tlt.ids import Epoch, Incarnation, JobId, WorkerId
from tlt.policies.job.job_queue import SessionState, decide
from tlt.protocol.commands import Command
from tlt.protocol.events import (
    AnyEvent,
    JobCancelRequested,
    JobEnded,
    JobPrepared,
    JobSubmitted,
    SessionEvent,
    SessionResumed,
    WorkerJoined,
    WorkerLost,
)
from tlt.protocol.records import WorkerInfo
from tlt.store import decider_state as book_module
from tlt.store.decider_state import DeciderState, replay
from tlt.store.journal import FILE_NAME, START, Position

SessionBook = DeciderState[SessionState]


def _events(turns: int) -> list[AnyEvent]:
    """Jobs that come, run, end and are cancelled, among workers that come and go."""
    events: list[AnyEvent] = [SessionResumed(epoch=Epoch(1), blobs_kept=False)]
    for turn in range(turns):
        job, worker = JobId(f"job-{turn}"), WorkerId(f"worker-{turn % 3}")
        info = WorkerInfo(
            worker=worker, incarnation=Incarnation(turn), ranks=1, host="h", rendezvous="h:1"
        )
        events += [
            WorkerJoined(info=info),
            JobSubmitted(job=job, spec=SPEC, folder="/runs"),
            JobPrepared(job=job, train_prompts=8, eval_prompts=turn),
            JobCancelRequested(job=JobId(f"job-{turn - 1}")),
            JobEnded(job=job, status="done", error=None)
            if turn % 3
            else WorkerLost(
                worker=worker, incarnation=Incarnation(turn), reason="gone", returning=False
            ),
        ]
    return events


def _open(folder: Path, committed: Position) -> SessionBook:
    return DeciderState(folder, committed, SessionState(), decide)


def _consume(book: SessionBook, events: Sequence[AnyEvent], batch: int = 3) -> Position:
    for start in range(0, len(events), batch):
        for number, event in enumerate(events[start : start + batch], start):
            book.decide(event, float(number))
        book.write()
        book.snapshot_if_due()
    return book.journal.position


def _straight(events: Sequence[AnyEvent]) -> SessionState:
    state = SessionState()
    for number, event in enumerate(events):
        state, _ = decide(state, event, float(number))  # pyright: ignore[reportArgumentType]
    return state


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(book_module, "_SNAPSHOT_EVERY", 7)
    return 7


def test_rebuilt_state_is_the_straight_one(tmp_path: Path, few: int) -> None:
    events = _events(12)
    committed = START
    for start in range(0, len(events), 11):
        book = _open(tmp_path, committed)
        assert book.state == _straight(events[:start])
        for number, event in enumerate(events[start : start + 11], start):
            book.decide(event, float(number))
        committed = book.write()
        book.snapshot_if_due()
        book.close()
    book = _open(tmp_path, committed)
    assert book.state == _straight(events)
    assert book.state.jobs
    assert book.state.workers
    book.close()
    state, position = replay(tmp_path / FILE_NAME, SessionState(), decide)
    assert (state, position) == (_straight(events), committed)


def test_snapshot_spares_reading_what_came_before(tmp_path: Path, few: int) -> None:
    events = _events(8)
    book = _open(tmp_path, START)
    committed = _consume(book, events)
    book.close()
    snapshot = tmp_path / "snapshot.msgpack"
    at = _snapshot_position(snapshot)
    assert committed.entries - few <= at.entries <= committed.entries
    path = tmp_path / FILE_NAME
    path.write_bytes(b"#" * at.bytes + path.read_bytes()[at.bytes :])
    book = _open(tmp_path, committed)
    assert book.state == _straight(events)
    book.close()


def test_no_snapshot_before_it_is_due(tmp_path: Path, few: int) -> None:
    book = _open(tmp_path, START)
    _consume(book, _events(3)[: few - 1])
    assert not (tmp_path / "snapshot.msgpack").exists()
    _consume(book, _events(3)[few - 1 : few])
    assert _snapshot_position(tmp_path / "snapshot.msgpack") == book.journal.position
    book.close()


@pytest.mark.parametrize("spoilt", [b"", b"\x81", b"\xc0"])
def test_spoilt_snapshot_costs_a_replay(spoilt: bytes, tmp_path: Path, few: int) -> None:
    events = _events(8)
    book = _open(tmp_path, START)
    committed = _consume(book, events)
    book.close()
    (tmp_path / "snapshot.msgpack").write_bytes(spoilt)
    book = _open(tmp_path, committed)
    assert book.state == _straight(events)
    book.close()


def test_snapshot_ahead_of_what_was_committed_is_not_used(tmp_path: Path, few: int) -> None:
    events = _events(8)
    book = _open(tmp_path, START)
    earlier = _consume(book, events[:5])
    _consume(book, events[5:])
    book.close()
    book = _open(tmp_path, earlier)
    assert book.state == _straight(events[:5])
    book.close()


def test_snapshot_that_cannot_be_written_stops_nobody(tmp_path: Path, few: int) -> None:
    (tmp_path / ".snapshot-unfinished").mkdir()
    events = _events(8)
    book = _open(tmp_path, START)
    committed = _consume(book, events)
    book.close()
    book = _open(tmp_path, committed)
    assert book.state == _straight(events)
    book.close()


def test_what_was_decided_and_not_written_is_forgotten(tmp_path: Path) -> None:
    events = _events(2)
    book = _open(tmp_path, START)
    committed = _consume(book, events[:4])
    book.decide(events[4], 4.0)
    book.close()
    book = _open(tmp_path, committed)
    assert book.state == _straight(events[:4])
    book.close()


def test_changed_commands_are_noticed(tmp_path: Path) -> None:
    book = _open(tmp_path, START)
    committed = _consume(book, _events(2))
    book.close()

    def other(
        state: SessionState, event: SessionEvent, now: float
    ) -> tuple[SessionState, Sequence[Command]]:
        state, commands = decide(state, event, now)
        return state, commands[:1]

    with pytest.raises(JournalError, match="entry 2 gives other commands than it did"):
        DeciderState(tmp_path, committed, SessionState(), other)


def test_journal_that_ends_elsewhere_is_noticed(tmp_path: Path) -> None:
    book = _open(tmp_path, START)
    committed = _consume(book, _events(2))
    book.close()
    wrong = msgspec.structs.replace(committed, entries=committed.entries + 1)
    with pytest.raises(JournalError, match=r"read, .* were committed"):
        _open(tmp_path, wrong)


def _snapshot_position(file: Path) -> Position:
    return msgspec.msgpack.decode(file.read_bytes(), type=book_module.Snapshot).position
