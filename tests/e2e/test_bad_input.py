"""Bad input gives one line that names it, no traceback, and exit code 2 or 3 or a failed job."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live import Live, Result, write_spec

pytestmark = pytest.mark.timeout(240)
Change = Callable[[dict[str, Any]], dict[str, Any]]


def one_line(result: Result) -> str:
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("tlt: ")
    return lines[0]


@pytest.fixture
def alone(tmp_path: Path) -> Live:
    """Return a home without a session."""
    return Live(tmp_path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("rollout.temprature=1", "rollout.temprature: unknown key; did you mean 'temperature'?"),
        ("rollout.slots=many", "rollout.slots: Expected `int`, got `str`"),
        ("algorithm.group_size=1", "algorithm: group_size must be at least 2"),
        ("rollout.top_k=5", "algorithm.allow_filtered_sampling"),
        ("policy.path=/no/model", "policy.path: /no/model: no such folder"),
        ("data.train=/no/data.jsonl", "data.train: /no/data.jsonl: no such file"),
    ],
)
def test_names_the_wrong_key_of_a_spec(live: Live, spec: Path, change: str, complaint: str) -> None:
    for command in (("config", "check"), ("submit",)):
        result = live.tlt(*command, str(spec), "--set", change, code=2)
        assert complaint in one_line(result)
        assert str(spec) in one_line(result)


def test_names_a_missing_spec(live: Live, tmp_path: Path) -> None:
    assert "cannot be read" in one_line(live.tlt("submit", str(tmp_path / "none.yaml"), code=2))


@pytest.mark.parametrize("command", ["submit", "jobs", "status", "down", "logs", "cancel"])
def test_names_a_session_that_is_not_up(alone: Live, spec: Path, command: str) -> None:
    argument = {"submit": [str(spec)], "logs": ["job-1"], "cancel": ["job-1"]}.get(command, [])
    complaint = one_line(alone.tlt(command, *argument, code=3))
    assert "no session 'default' is up" in complaint


def test_names_an_unknown_job(live: Live) -> None:
    for command in ("logs", "cancel"):
        assert "there is no job 'ghost-1'" in one_line(live.tlt(command, "ghost-1", code=2))


def test_up_names_a_url_where_no_redis_answers(alone: Live) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}/0"
        complaint = one_line(alone.tlt("up", "--redis-url", url, code=2))
    assert f"no Redis answers at {url}" in complaint


def test_up_names_a_malformed_redis_url(alone: Live) -> None:
    assert "write redis://" in one_line(alone.tlt("up", "--redis-url", "localhost", code=2))


def test_up_names_a_folder_of_runs_that_cannot_be_written(alone: Live) -> None:
    complaint = one_line(alone.tlt("up", "--runs", "/proc/runs", code=2))
    assert "/proc/runs" in complaint


def test_up_names_a_socket_in_use(alone: Live) -> None:
    from tlt.session.session_files import short_folder

    short = short_folder(alone.home / "tlt" / "sessions" / "default")
    short.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(short / "redis.sock"))
        other.listen()
        complaint = one_line(alone.tlt("up", code=2))
    assert "redis.sock" in complaint


def test_up_refuses_a_session_of_an_older_version(alone: Live) -> None:
    journal = alone.home / "tlt" / "sessions" / "default" / "session" / "journal.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text('{"seq":0,"at":1.0,"event":{"type":"SessionResumed"},"commands":"00"}\n')
    complaint = one_line(alone.tlt("up", code=2))
    assert f"{journal}: written by TLT with journal schema 1" in complaint


def _with(path: str, value: Any) -> Change:
    section, _, key = path.partition(".")
    return lambda raw: {**raw, section: {**raw[section], key: value}}


@pytest.fixture(scope="module")
def refusals(
    live: Live, raw_spec: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Return the errors of failing jobs, which are submitted together to prepare them in a row."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "gpt2").mkdir()
    (folder / "gpt2" / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    files = {
        "empty": "",
        "malformed": '{"prompt": "01+01=", "answer": "2"}\n{"prompt": \n',
        "keyless": '{"question": "01+01="}\n',
        "long": json.dumps({"prompt": "1" * 600, "answer": "1"}) + "\n",
    }
    for name, text in files.items():
        (folder / f"{name}.jsonl").write_text(text)
    changes: dict[str, Change] = {
        "other family": _with("policy.path", str(folder / "gpt2")),
        "missing function": lambda raw: {
            **raw,
            "reward": {"kind": "function", "function": "no.such.module:reward"},
        },
        **{name: _with("data.train", str(folder / f"{name}.jsonl")) for name in files},
    }
    jobs = {
        name: live.submit(write_spec(folder, change(raw_spec), f"{name}.yaml"))
        for name, change in changes.items()
    }
    ended = {name: live.await_end(job) for name, job in jobs.items()}
    assert {job["status"] for job in ended.values()} == {"failed"}
    return {name: job["error"] for name, job in ended.items()}


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("other family", "GPT2LMHeadModel"),
        ("missing function", "reward.function: no.such.module cannot be imported"),
        ("empty", "empty.jsonl: it has no rows"),
        ("malformed", "malformed.jsonl:2: not valid JSON"),
        ("keyless", "keyless.jsonl:1: no key 'prompt'"),
        ("long", "long.jsonl: all prompts have more than"),
    ],
)
def test_names_the_cause_of_a_failed_job(
    refusals: dict[str, str], name: str, complaint: str
) -> None:
    assert complaint in refusals[name]
    assert "\n" not in refusals[name]


def test_exits_with_1_after_a_failed_job(live: Live, spec: Path, tmp_path: Path) -> None:
    result = live.tlt(*("submit", str(spec), "--wait", "--set", f"policy.path={tmp_path}"), code=1)
    assert "config.json" in one_line(result)
