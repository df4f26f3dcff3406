"""`tlt status` shows the session's actors and what to do, whatever Redis refuses."""

import fcntl
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from redis.exceptions import ResponseError
from typer.testing import CliRunner

from cli.main import app
from tests.small_disk import fill, small_disk
from tlt.session.session_files import LOCK_FILE, session_folder, write_session
from tlt.spec.config import SessionSpec
from tlt.store.embedded_redis import EmbeddedRedis


def test_shows_what_to_do_where_the_disk_of_redis_is_full(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLT_HOME", str(tmp_path / "home"))
    folder = session_folder("default")
    with small_disk(tmp_path / "disk") as disk, ExitStack() as ending:
        server = EmbeddedRedis(disk / "redis", short_folder / "redis.sock")
        server.start()
        ending.callback(server.stop)
        spec = SessionSpec(
            name="default",
            folder=str(folder),
            runs=str(tmp_path / "runs"),
            flight=str(tmp_path / "flight"),
            redis_url=server.url,
        )
        write_session(spec)
        filler = fill(disk)
        with open(folder / LOCK_FILE, "wb") as lock, redis.Redis.from_url(server.url) as client:
            fcntl.flock(lock, fcntl.LOCK_EX)
            refused(client)
            with pytest.raises(ResponseError, match="MISCONF"):
                client.ping()
            shown = CliRunner().invoke(app, ["status"])
            filler.unlink()
    assert shown.exit_code == 0, shown.output
    assert "coordinator" in shown.output
    assert "Free space on its disk, and all goes on by itself" in shown.output


def refused(client: redis.Redis) -> None:
    """Write until Redis has noticed that its disk is full."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            client.set("key", "x" * 10_000)
        except ResponseError:
            return
        time.sleep(0.02)
    raise AssertionError("Redis takes writes")
