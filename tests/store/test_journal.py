"""Invariant: the journal holds whole entries in order, up to the committed position."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.samples import JOB, SPEC
from tlt.errors import JournalError
from tlt.protocol.commands import CancelJob, Command, PrepareJob
from tlt.protocol.events import AnyEvent, JobRefused, JobSubmitted
from tlt.protocol.refs import SCHEMA_VERSION
from tlt.store.journal import (
    FILE_NAME,
    START,
    Journal,
    Position,
    check_schema,
    digest,
    follow,
    read,
)

EVENTS: list[AnyEvent] = [
    JobSubmitted(job=JOB, spec=SPEC, folder="/runs"),
    CancelJob(job=JOB),
    JobRefused(job=JOB, error="an error\nof two lines: ü"),
]
_SCHEMA = b'"schema":%d' % SCHEMA_VERSION
_READS = f"this version reads schema {SCHEMA_VERSION}"
_LATER = SCHEMA_VERSION + 1
COMMANDS: list[Command] = [PrepareJob(job=JOB, spec=SPEC, folder="/runs")]


def _write(folder: Path, count: int = 3) -> Position:
    journal = Journal(folder, START)
    for number in range(count):
        journal.append([(number + 0.5, EVENTS[number % 3], COMMANDS)])
    journal.sync()
    journal.close()
    return journal.position


def test_reads_what_was_appended(tmp_path: Path) -> None:
    position = _write(tmp_path / "run")
    path = tmp_path / "run" / FILE_NAME
    entries = list(read(path))
    assert [entry.event for entry in entries] == EVENTS
    assert [(entry.seq, entry.at) for entry in entries] == [(0, 0.5), (1, 1.5), (2, 2.5)]
    assert {entry.commands for entry in entries} == {digest(COMMANDS)}
    assert digest(COMMANDS) != digest([])
    followed = list(follow(path))
    assert followed[-1][1] == position == Position(3, path.stat().st_size)
    assert [entry.seq for entry in read(path, followed[0][1])] == [1, 2]


def test_numbers_a_batch_after_the_last_entry(tmp_path: Path) -> None:
    position = _write(tmp_path)
    journal = Journal(tmp_path, position)
    journal.append([(9.0, event, []) for event in EVENTS])
    journal.close()
    assert [entry.seq for entry in read(tmp_path / FILE_NAME)] == list(range(6))


def test_ignores_a_torn_last_line(tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for length in (last + 1, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert [entry.seq for entry in read(path)] == [0, 1]


def test_cuts_off_entries_that_were_not_committed(tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / FILE_NAME
    committed = next(follow(path))[1]
    journal = Journal(tmp_path, committed)
    assert [entry.event for entry in read(path)] == EVENTS[:1]
    journal.append([(7.0, EVENTS[2], [])])
    journal.close()
    assert [(entry.seq, entry.event) for entry in read(path)] == [(0, EVENTS[0]), (1, EVENTS[2])]


def test_refuses_a_file_shorter_than_committed(tmp_path: Path) -> None:
    position = _write(tmp_path)
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-1])
    complaint = rf"{path}: {position.bytes - 1} bytes, but {position.bytes} were committed"
    with pytest.raises(JournalError, match=complaint):
        Journal(tmp_path, position)


def test_names_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError) as error:
        Journal(tmp_path / "file" / "run", START)
    path = tmp_path / "file" / "run" / FILE_NAME
    assert str(error.value) == f"{path}: cannot be written: Not a directory"


def test_names_a_missing_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="there is no journal"):
        list(read(tmp_path / FILE_NAME))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{%b}\n" % _SCHEMA, "entry 3 cannot be read"),
        (b"\n", "entry 3 cannot be read"),
        (b"{}\n", f"written by TLT with journal schema 1; {_READS}"),
        (b'{"seq":3,%b,"at":1,"event":"\xff"}\n' % _SCHEMA, "entry 3 cannot be read"),
        (None, "entry 0 stands where 3 should"),
    ],
)
def test_names_a_damaged_line(line: bytes | None, complaint: str, tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    path.write_bytes(whole + (line or whole.partition(b"\n")[0] + b"\n"))
    with pytest.raises(JournalError, match=complaint):
        list(read(path))


def test_refuses_an_entry_in_which_a_bit_has_changed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, START)
    journal.append([(7.5, EVENTS[1], [])])
    journal.close()
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    for place, byte in enumerate(whole[:-1]):
        damaged = bytes([byte ^ (1 << place % 8)])
        path.write_bytes(whole[:place] + damaged + whole[place + 1 :])
        with pytest.raises(JournalError, match=str(path)):
            list(read(path))


def test_reads_lines_that_have_no_checksum(tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / FILE_NAME
    path.write_bytes(re.sub(rb',"crc":\d+}', b"}", path.read_bytes()))
    assert [entry.event for entry in read(path)] == EVENTS


@pytest.mark.parametrize(
    ("version", "found"), [(b"", 1), (b'"schema":1,', 1), (b'"schema":%d,' % _LATER, _LATER)]
)
@pytest.mark.parametrize("event", [b'{"type":"CancelJob","job":"a"}', b'{"type":"Gone"}'])
def test_refuses_a_journal_of_another_schema(
    version: bytes, found: int, event: bytes, tmp_path: Path
) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(b'{"seq":0,%b"at":1.0,"event":%b,"commands":"00"}\n' % (version, event))
    for refuse in (lambda: list(read(path)), lambda: check_schema(tmp_path)):
        with pytest.raises(JournalError) as error:
            refuse()
        assert str(error.value) == (
            f"{path}: written by TLT with journal schema {found}; {_READS}: "
            "finish or export that run with the older version"
        )


def test_accepts_a_folder_without_a_journal(tmp_path: Path) -> None:
    check_schema(tmp_path)


FULL_DISK = """
import resource, sys
from pathlib import Path
from tests.store.test_journal import EVENTS
from tlt.errors import JournalError
from tlt.store.journal import START, Journal, read

journal = Journal(Path(sys.argv[1]), START)
journal.append([(0.0, EVENTS[1], [])])
before = journal.position
resource.setrlimit(resource.RLIMIT_FSIZE, (before.bytes + 50, resource.RLIM_INFINITY))
try:
    journal.append([(1.0, event, []) for event in EVENTS])
except JournalError as error:
    print(error)
assert journal.position == before
assert journal.path.stat().st_size == before.bytes
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.append([(2.0, EVENTS[2], [])])
assert [(entry.seq, entry.at) for entry in read(journal.path)] == [(0, 0.0), (1, 2.0)]
"""


def test_leaves_no_torn_entry_on_a_full_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True
    )
    assert done.stdout == f"{tmp_path / FILE_NAME}: cannot be written: File too large\n"
    assert done.returncode == 0, done.stderr
