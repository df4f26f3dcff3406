"""Bad input gives one line that names it, no traceback, and exit code 2 or 3.

What a session refuses is in tests/local_session.
"""

import socket
from pathlib import Path

import pytest

from tests.e2e.live import Live
from tests.in_process_cli import Outcome, run_command

pytestmark = pytest.mark.timeout(600)


def one_line(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("tlt: ")
    return lines[0]


@pytest.fixture
def alone(tmp_path: Path) -> Live:
    """Return a home without a session."""
    return Live(tmp_path)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLT_HOME", str(tmp_path / "tlt"))


def refused(code: int, *arguments: str) -> str:
    """Return the complaint of a command that ends with this code."""
    outcome: Outcome = run_command(*arguments)
    assert outcome.code == code, outcome
    return one_line(outcome.stderr)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("rollout.temprature=1", "rollout.temprature: unknown key; did you mean 'temperature'?"),
        ("rollout.slots=many", "rollout.slots: Invalid enum value 'many'"),
        ("algorithm.group_size=1", "algorithm: group_size must be at least 2"),
        ("rollout.top_k=5", "algorithm.allow_filtered_sampling"),
        ("policy.path=/no/model", "policy.path: /no/model: no such folder"),
        ("data.train=/no/data.jsonl", "data.train: /no/data.jsonl: no such file"),
    ],
)
def test_names_the_wrong_key_of_a_spec(spec: Path, change: str, complaint: str) -> None:
    for command in (("config", "check"), ("submit",)):
        named = refused(2, *command, str(spec), "--set", change)
        assert complaint in named
        assert str(spec) in named


def test_names_a_missing_spec(tmp_path: Path) -> None:
    assert "cannot be read" in refused(2, "submit", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("command", ["submit", "jobs", "status", "down", "logs", "cancel"])
def test_names_a_session_that_is_not_up(spec: Path, command: str) -> None:
    argument = {"submit": [str(spec)], "logs": ["job-1"], "cancel": ["job-1"]}.get(command, [])
    assert "no session 'default' is up" in refused(3, command, *argument)


def test_up_names_a_url_where_no_redis_answers(alone: Live) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}/0"
        complaint = one_line(alone.tlt("up", "--redis-url", url, code=2).stderr)
    assert f"no Redis answers at {url}" in complaint


def test_up_names_a_malformed_redis_url() -> None:
    assert "write redis://" in refused(2, "up", "--redis-url", "localhost")


def test_up_names_a_folder_of_runs_that_cannot_be_written() -> None:
    assert "/proc/runs" in refused(2, "up", "--runs", "/proc/runs")


def test_up_names_a_socket_in_use(alone: Live) -> None:
    from tlt.session.session_files import short_folder

    short = short_folder(alone.home / "tlt" / "sessions" / "default")
    short.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(short / "redis.sock"))
        other.listen()
        complaint = one_line(alone.tlt("up", code=2).stderr)
    assert "redis.sock" in complaint


def test_up_refuses_a_session_of_an_older_version(alone: Live) -> None:
    journal = alone.home / "tlt" / "sessions" / "default" / "session" / "journal.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text('{"seq":0,"at":1.0,"event":{"type":"SessionResumed"},"commands":"00"}\n')
    complaint = one_line(alone.tlt("up", code=2).stderr)
    assert f"{journal}: written by TLT with journal schema 1" in complaint
