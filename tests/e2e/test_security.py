"""SECURITY.md is true of a session whose Redis has TLS and a password.

Crafted messages are written to its streams while a job runs.
"""

import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import redis
from grpc import StatusCode

from tests.conftest import free_port
from tests.crafted import changed_bytes, changed_values
from tests.e2e.live import Live, wait_until, write_spec
from tests.nobody import opened_by_nobody
from tests.ray_ports import (
    CALLS,
    EVERYWHERE,
    LOOPBACK,
    METRICS_PORT,
    call,
    listening,
    own_address,
    page,
)
from tests.samples import answer, prompt
from tests.tls_redis import TlsRedis
from tests.tools import require_tools
from tlt.base.end_session_processes import processes_of
from tlt.base.id_types import Incarnation, JobId, Step, WorkerId
from tlt.errors import StoreError
from tlt.protocol.commands import PromptIssued, StopDrafterTraining, WorkerCommand
from tlt.protocol.events import AnyEvent
from tlt.protocol.refs import SCHEMA_VERSION
from tlt.session.session_files import blobs_in_flight, load_session, short_folder
from tlt.store.message_codec import Codec
from tlt.store.redis_keys import Keys

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
PASSWORD, LOGGER_KEY = secrets.token_hex(16), secrets.token_hex(16)
SEED = 4


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Return a folder that other users may enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="tlt-test-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[TlsRedis]:
    require_tools("redis-server", "openssl")
    (place / "server").mkdir()
    with TlsRedis(place / "server", PASSWORD) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(place: Path, server: TlsRedis) -> Iterator[Live]:
    """Start a session of one worker, with keys of a logger in its environment."""
    session = Live(place)
    session.environment |= {"TLT_REDIS_URL": server.trusted_url, "WANDB_API_KEY": LOGGER_KEY}
    session.tlt(
        "up", "--workers", "1", "--runs", str(session.runs), "--lease-seconds", "8", seconds=220
    )
    yield session
    session.tlt("down")


def session_of(live: Live) -> Path:
    return live.home / "tlt" / "sessions" / "default"


# --- crafted messages


class Crafted:
    """Writes 300 messages to the streams of a running job."""

    def __init__(self, connection: Any, keys: Keys, job: str) -> None:
        self._connection = connection
        self._keys = keys
        self._job = JobId(job)
        self._chooser = Random(SEED)
        self.unreadable = 0

    def write(self) -> None:
        worker, incarnation = WorkerId("w0"), Incarnation(int(self._incarnation()))
        lost = msgspec.structs.replace(answer(0), job=self._job, worker=worker)
        far = msgspec.structs.replace(lost, step=Step(10**6), prompt=10**9, length=2**50)
        late = msgspec.structs.replace(lost, incarnation=Incarnation(0))
        stop = StopDrafterTraining(
            worker=worker, incarnation=incarnation, job=JobId("other"), training_session=3
        )
        stale = msgspec.structs.replace(stop, job=self._job, incarnation=Incarnation(10**6))
        self._add(self._keys.events, AnyEvent, [lost, far, late], 200)
        self._add(self._keys.commands(worker, incarnation), WorkerCommand, [stop, stale], 60)
        self._add(self._keys.prompts(self._job), PromptIssued, [prompt(1), prompt(2)], 40)

    def _incarnation(self) -> bytes:
        return self._connection.hget(self._keys.fence, "w0")

    def _add(self, key: str, kind: Any, samples: list[Any], count: int) -> None:
        codec = Codec[Any](kind)
        for _ in range(count):
            change = self._chooser.choice((changed_bytes, changed_values, lambda raw, _: raw))
            raw = change(msgspec.msgpack.encode(self._chooser.choice(samples)), self._chooser)
            fields = {b"v": b"%d" % SCHEMA_VERSION, b"m": raw}
            try:
                codec.decode(fields)
            except StoreError:
                self.unreadable += 1
            self._connection.xadd(key, fields)


class Finished(msgspec.Struct):
    job: str
    unreadable: int
    dead_letters: Counter[bytes]
    processes: list[Any]


@pytest.fixture(scope="module")
def finished(guarded: Live, raw_spec: dict[str, Any]) -> Finished:
    """Run a job, and write crafted messages while it decodes."""
    spec = load_session(session_of(guarded))
    keys = Keys(spec.name)
    before = processes(guarded)
    job = guarded.submit(write_spec(guarded.home, raw_spec))
    guarded.await_phase(job, "rollout")
    with redis.Redis.from_url(spec.redis_url) as connection:
        crafted = Crafted(connection, keys, job)
        crafted.write()
        guarded.await_end(job)

        def dead() -> Any:
            return connection.xrange(keys.dead_letters)

        wait_until(lambda: len(dead()) >= crafted.unreadable, "all dead letters")
        letters = Counter(fields[b"source"] for _, fields in dead())
    return Finished(job, crafted.unreadable, letters, [before, processes(guarded)])


def processes(live: Live) -> Any:
    return [(each["name"], each["pid"]) for each in live.json("status")["processes"]]


def test_a_job_runs_over_tls_to_its_end_whatever_is_in_the_streams(
    guarded: Live, finished: Finished
) -> None:
    assert guarded.job(finished.job)["status"] == "done"
    snapshot = guarded.fold(finished.job)
    assert snapshot.version == 2
    assert [step.rollouts for step in snapshot.steps] == [32, 32]
    assert finished.processes[0] == finished.processes[1]


def test_unreadable_messages_of_every_stream_become_dead_letters(finished: Finished) -> None:
    assert finished.dead_letters.total() == finished.unreadable > 100
    assert len(finished.dead_letters) == 3


# --- secrets


def test_no_log_journal_or_output_holds_a_secret(guarded: Live, finished: Finished) -> None:
    folders = [guarded.home / "tlt", guarded.runs, short_folder(session_of(guarded))]
    found = {
        file: file.stat().st_mode & 0o777
        for folder in folders
        for file in folder.rglob("*")
        if file.is_file() and holds(file, PASSWORD)
    }
    assert found == {session_of(guarded) / "session.json": 0o600}
    token = (session_of(guarded) / "dashboard-token").read_text()
    ray_token = (session_of(guarded) / "ray-token").read_text()
    for secret in (LOGGER_KEY, token, ray_token):
        holders = [f for folder in folders for f in folder.rglob("*") if holds(f, secret)]
        assert {f.name for f in holders} <= {"dashboard-token", "dashboard.json", "ray-token"}
        assert {f.stat().st_mode & 0o777 for f in holders} <= {0o600}
    kept = b"".join(in_redis(session_of(guarded)))
    assert len(kept) > 10_000
    commands = b"".join(processes_of(session_of(guarded)).values())
    for secret in (PASSWORD, LOGGER_KEY, token, ray_token):
        assert secret.encode() not in kept + commands
    for command in (("status",), ("status", "--json"), ("jobs", "--json")):
        shown = guarded.tlt(*command)
        assert PASSWORD not in shown.stdout + shown.stderr
        assert LOGGER_KEY not in shown.stdout + shown.stderr


def in_redis(folder: Path) -> Iterator[bytes]:
    """Return what messages and records hold."""
    with redis.Redis.from_url(load_session(folder).redis_url) as client:
        connection: Any = client
        for key in connection.scan_iter(_type="stream"):
            for _, fields in connection.xrange(key):
                yield from fields.values()
        for key in connection.scan_iter(_type="hash"):
            yield from connection.hvals(key)


def holds(file: Path, secret: str) -> bool:
    return file.is_file() and secret.encode() in file.read_bytes()


# --- wrong tokens


_READ = """
import sys
from ray._raylet import GcsClient
try:
    print("nodes", len(GcsClient(address=sys.argv[1]).get_all_node_info()))
except Exception as error:
    print(type(error).__name__)
"""


def test_ray_refuses_a_wrong_and_a_missing_token(guarded: Live) -> None:
    token = session_of(guarded) / "ray-token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    mode = {"RAY_AUTH_MODE": "token"}
    tries = (
        ("nodes 1", {**mode, "RAY_AUTH_TOKEN_PATH": str(token)}),
        ("AuthenticationError", {**mode, "RAY_AUTH_TOKEN": "0" * 64}),
        ("AuthenticationError", {}),
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _READ, ray_address(guarded)],
            env=plain | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _, variables in tries
    ]
    said = [child.communicate(timeout=100)[0].strip() for child in children]
    assert said == [expected for expected, _ in tries]


def test_rays_ports_take_calls_with_the_token_only(guarded: Live) -> None:
    token, here = (session_of(guarded) / "ray-token").read_text(), own_address()
    started = processes_of(session_of(guarded))
    open_ports = {port for port, where in listening(started).items() if where != {LOOPBACK}}
    answered: set[str] = set()
    for port in open_ports:
        without, known = call(f"{here}:{port}"), call(f"{here}:{port}", token)
        if set(known.values()) == {StatusCode.OK}:
            assert set(without.values()) == {StatusCode.UNAUTHENTICATED}, known
            answered |= known.keys()
        elif port != METRICS_PORT:  # of its autoscaler, which need none
            refused = page(f"{here}:{port}") == 401
            assert refused or port not in listening(processes_of(session_of(guarded))), started
    assert answered == set(CALLS)
    assert listening(started)[int(ray_address(guarded).partition(":")[2])] == {EVERYWHERE}


def test_a_cluster_without_tokens_is_refused(short_folder: Path, tmp_path: Path) -> None:
    port, plain = free_port(), {n: v for n, v in os.environ.items() if not n.startswith("RAY_")}
    options = ("--node-ip-address", "127.0.0.1", "--num-cpus", "1", "--include-dashboard", "false")
    cluster = subprocess.Popen(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options),
            *("--port", str(port), "--temp-dir", str(short_folder / "ray")),
        ],
        env={**plain, "RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    user = Live(tmp_path)
    user.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    try:
        address = f"127.0.0.1:{port}"
        wait_until(lambda: _listens(port), "the cluster")
        up = ("up", "--ray", address, "--redis-url", "rediss://:x@127.0.0.1:1", "--runs")
        refused = user.tlt(*up, str(user.runs), code=2).stderr
        assert f"--ray {address}: it takes calls without a token" in refused
    finally:
        cluster.terminate()
        cluster.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def ray_address(live: Live) -> str:
    """Return an address of Ray's GCS, from the command line of its raylet."""
    pid = next(pid for name, pid in processes(live) if name == "Ray's raylet")
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    address = next(a.partition("=")[2] for a in arguments if a.startswith("--gcs-address="))
    return f"127.0.0.1:{address.rpartition(':')[2]}"


# --- another user of the machine


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_opens_nothing_of_a_session(guarded: Live, place: Path) -> None:
    folder = session_of(guarded)
    short = short_folder(folder)
    kept = [folder, short, blobs_in_flight(short)]
    assert [stat.S_IMODE(each.stat().st_mode) for each in kept] == [0o700] * 3
    inside = [folder / name for name in ("session.json", "ray-token", "logs", "session")]
    sockets = list(short.rglob("*.sock"))
    (blobs_in_flight(short) / "blob").write_bytes(b"weights")
    assert (
        opened_by_nobody(*kept, *inside, *sockets, blobs_in_flight(short) / "blob", enter=place)
        == []
    )
    (place / "open").write_text("")
    assert opened_by_nobody(place / "open", enter=place) == [str(place / "open")]


def test_a_runs_folder_has_the_permissions_of_the_umask(guarded: Live, finished: Finished) -> None:
    umask = os.umask(0o077)
    os.umask(umask)
    run = guarded.runs / finished.job
    for file in (run, *run.rglob("*")):
        whole = 0o777 if file.is_dir() else 0o666
        assert stat.S_IMODE(file.stat().st_mode) & ~(whole & ~umask) == 0, file
    journal = run / "journal.jsonl"
    assert stat.S_IMODE(journal.stat().st_mode) == 0o666 & ~umask
