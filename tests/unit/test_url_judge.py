"""A judge behind a URL is asked again while it is busy, and its reply is checked."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tlt.errors import ConfigError
from tlt.rewards.kinds.url_judge import UrlJudge
from tlt.rewards.process.reward_pool import RewardPool
from tlt.spec.reward import RewardSpec

Reply = tuple[int, str]


class Judge(ThreadingHTTPServer):
    """Gives prepared replies, and keeps the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies: list[Reply] = []
        self.requests: list[tuple[dict[str, str], Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/judge"


class _Handler(BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((dict(self.headers), json.loads(body)))
        status, reply = self.server.replies.pop(0)
        self.send_response(status)
        if status == 302:
            self.send_header("Location", self.server.url)
        self.end_headers()
        self.wfile.write(reply.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[Judge]:
    with Judge() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(judge: Judge, seconds: float = 10.0, **changes: Any) -> float | None:
    spec = RewardSpec(kind="url", url=judge.url, timeout_seconds=seconds, **changes)
    return UrlJudge(spec)("so 7", "7", {"x": 1})


def test_posts_the_answer_and_returns_the_reward(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    judge.replies = [(200, '{"reward": 0.5, "why": "short"}')]
    assert ask(judge, token_variable="JUDGE_TOKEN") == 0.5
    ((headers, body),) = judge.requests
    assert body == {"completion": "so 7", "answer": "7", "row": {"x": 1}}
    assert headers["Authorization"] == "Bearer secret"


def test_asks_a_busy_judge_again(judge: Judge) -> None:
    judge.replies = [(503, ""), (429, ""), (200, '{"reward": null}')]
    assert ask(judge) is None
    assert len(judge.requests) == 3


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ((200, "{}"), "no reward"),
        ((200, "7"), "no reward"),
        ((404, ""), "404"),
        ((200, "?"), "Expecting value"),
    ],
)
def test_a_reply_without_a_reward_is_an_error(judge: Judge, reply: Reply, error: str) -> None:
    judge.replies = [reply]
    with pytest.raises(Exception, match=error):
        ask(judge)


def test_a_redirect_is_not_followed(judge: Judge) -> None:
    """Another host would get the token."""
    judge.replies = [(302, ""), (200, '{"reward": 1}')]
    with pytest.raises(Exception, match="302"):
        ask(judge)
    assert len(judge.requests) == 1


async def test_one_that_stays_busy_says_so_in_time(judge: Judge, tmp_path: Path) -> None:
    judge.replies = [(503, "")] * 100
    spec = RewardSpec(kind="url", url=judge.url, timeout_seconds=2.0)
    pool = RewardPool(spec, tmp_path / "log")
    try:
        result = await pool.score("", "7", {})
    finally:
        await pool.stop()
    assert result.reward is None
    assert result.error is not None
    assert "503" in result.error


def test_what_cannot_be_asked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="neither http"):
        UrlJudge(RewardSpec(kind="url", url="ftp://host"))
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="JUDGE_TOKEN isn't set"):
        UrlJudge(RewardSpec(kind="url", url="http://host", token_variable="JUDGE_TOKEN"))
