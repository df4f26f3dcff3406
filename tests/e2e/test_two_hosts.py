"""A session on two hosts of a Ray cluster: network namespaces of one machine."""

import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live import (
    TLT,
    Live,
    Result,
    count_dropped,
    counted_rollouts,
    wait_until,
    write_spec,
)
from tests.hosts.network import Host, complaint, two_hosts
from tlt.base.id_types import WorkerId
from tlt.protocol.events import DrafterDeltaReady, RolloutFinished, WorkerLost
from tlt.runs.run_folder_reader import open_ledger
from tlt.store.embedded_redis import find_binary

_LACKING = complaint()
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(_LACKING is not None, reason=f"no network namespaces: {_LACKING}"),
]
RAY_PORT, REDIS_PORT = 6379, 7000
STEPS, ANSWERS_A_STEP = 2, 4 * 8


class Cluster(Live):
    """A session whose commands are given on the first of two hosts."""

    def __init__(self, home: Path, first: Host, second: Host) -> None:
        super().__init__(home)
        self.first, self.second = first, second
        token = home / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        for host in (first, second):
            host.environment |= {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(token),
                "TLT_HOME": str(home / "tlt"),
            }

    def tlt(self, *arguments: str, code: int = 0, seconds: float = 240.0) -> Result:
        result = subprocess.run(
            self.first.enter([*TLT, *arguments]),
            env=self.first.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert result.returncode == code, f"{arguments}: {result.stdout}\n{result.stderr}"
        return result

    def start_ray(self, host: Host, *place: str) -> None:
        log = self.home / f"ray-{host.address}.log"
        log.unlink(missing_ok=True)
        options = ["--num-cpus", "1", "--object-store-memory", str(80 << 20)]
        address = ["--node-ip-address", host.address]
        daemon = host.start("ray", "start", "--block", *address, *options, *place, log=log)
        wait_until(lambda: b"Ray runtime started" in log.read_bytes(), f"Ray: {log.read_text()}")
        assert daemon.poll() is None, log.read_text()

    def start_head(self) -> None:
        folder = str(self.home / "ray")
        place = ["--head", "--port", str(RAY_PORT), "--temp-dir", folder]
        self.start_ray(self.first, *place, "--include-dashboard", "false")

    def start_node(self) -> None:
        self.start_ray(self.second, "--address", f"{self.first.address}:{RAY_PORT}")

    def start_redis(self) -> str:
        """Start a server with a password, and return its URL."""
        password = secrets.token_hex(8)
        place = ["--bind", self.first.address, "--port", str(REDIS_PORT)]
        server = [str(find_binary()), *place, "--requirepass", password, "--save", ""]
        self.first.start(*server, log=self.home / "redis.log")
        return f"redis://:{password}@{self.first.address}:{REDIS_PORT}"

    def up(self) -> None:
        ray = f"{self.first.address}:{RAY_PORT}"
        options = ["--runs", str(self.runs), "--lease-seconds", "4", "--no-dashboard"]
        self.tlt("up", "--ray", ray, "--redis-url", self.start_redis(), *options)

    def worker_on(self, host: Host) -> WorkerId:
        """Return the worker that beat last from a host."""
        return next(
            WorkerId(name) for name, beat in self.workers().items() if beat.host == host.address
        )

    def process_of(self, name: str) -> int:
        found = self.json("status")["processes"]
        return next(process["pid"] for process in found if process["name"] == name)

    def logs(self) -> list[Path]:
        """Return the logs of the actors."""
        return list((self.home / "tlt" / "sessions" / "default" / "logs").glob("*.jsonl"))

    def states(self) -> dict[str, str]:
        return {process["name"]: process["state"] for process in self.json("status")["processes"]}


@pytest.fixture
def cluster(short_folder: Path) -> Iterator[Cluster]:
    with two_hosts(short_folder) as hosts:
        session = Cluster(short_folder, *hosts)
        session.start_head()
        session.start_node()
        session.up()
        yield session


@pytest.fixture
def learning_spec(home: Path, raw_spec: dict[str, Any]) -> Path:
    """Return a job with answers of seconds, whose workers train the drafter."""
    learning = {
        **raw_spec,
        "name": "learning",
        "rollout": {"max_new_tokens": 480, "slots": 4},
        "speculation": {"mode": "adaptive"},
        "drafter": {"train": "always"},
        "algorithm": {**raw_spec["algorithm"], "eval_every": 0},
    }
    return write_spec(home, learning, "learning.yaml")


def rewards(session: Live, job: str) -> list[float]:
    """Return the reward of each step of a job that has ended, and lost and doubled nothing."""
    journal = session.journal(job)
    counted = counted_rollouts(journal, open_ledger(session.runs / job))
    assert len(counted) == len(set(counted))
    assert count_dropped(journal) == 0
    steps = session.fold(job).steps
    assert {step.rollouts for step in steps} == {ANSWERS_A_STEP}
    return [step.reward for step in steps]


def run(session: Live, spec: Path) -> tuple[str, list[float]]:
    job = session.submit(spec)
    assert session.await_end(job, 300.0)["status"] == "done", session.job(job)["error"]
    found = rewards(session, job)
    assert len(found) == STEPS
    return job, found


def events(session: Live, job: str, kind: type[Any]) -> list[Any]:
    return [entry.event for entry in session.journal(job) if isinstance(entry.event, kind)]


def await_decoding(session: Live, worker: WorkerId, incarnation: int) -> None:
    """Wait until a worker of a later incarnation decodes, in this step of the job or in another."""

    def decodes() -> bool:
        beat = session.workers()[worker]
        return beat.incarnation > incarnation and beat.running > 0

    wait_until(decodes, f"{worker} to decode", 300.0)


def test_a_session_uses_two_hosts_and_survives_their_separation(
    cluster: Cluster, live: Live, learning_spec: Path
) -> None:
    far = cluster.worker_on(cluster.second)
    near = cluster.worker_on(cluster.first)

    job, undisturbed = run(cluster, learning_spec)
    _, on_one_host = run(live, learning_spec)
    assert undisturbed == pytest.approx(on_one_host)
    assert {event.worker for event in events(cluster, job, RolloutFinished)} == {near, far}
    assert events(cluster, job, DrafterDeltaReady)
    assert any("blob fetched" in log.read_text() for log in cluster.logs())

    # what its processes write is removed with the session, whoever is killed
    scratch = f"TMPDIR={cluster.first.folder}/tlt-".encode()
    for service in ("coordinator", "reward"):
        pid = cluster.process_of(service)
        assert scratch in Path(f"/proc/{pid}/environ").read_bytes(), service

    # cut off for longer than a lease, in a job that goes on until it is cancelled
    job = cluster.submit(learning_spec, "algorithm.steps=100000")
    await_decoding(cluster, far, 0)
    cut_off = cluster.workers()[far].incarnation
    cluster.second.cut_off()
    wait_until(lambda: lost(cluster, job, far, cut_off), f"{far} to lose its lease")
    assert cluster.states()[far] == "lost"
    assert cluster.states()[near] == "up"
    cluster.second.connect()
    await_decoding(cluster, far, cut_off)

    # lost with all that ran on it, and started again
    ended = cluster.workers()[far].incarnation
    cluster.second.end_processes()
    wait_until(lambda: lost(cluster, job, far, ended), f"{far} to lose its lease")
    cluster.start_node()
    await_decoding(cluster, far, ended)
    cluster.tlt("cancel", job)
    assert cluster.await_end(job)["status"] == "cancelled"
    assert rewards(cluster, job)[:STEPS] == pytest.approx(undisturbed)

    cluster.tlt("down")
    for host in (cluster.first, cluster.second):
        assert [name for name in host.files("/dev/shm") if name.startswith("tlt-")] == []
        assert [name for name in host.files(host.folder) if name.startswith("tlt-")] == []


def lost(session: Live, job: str, worker: WorkerId, incarnation: int) -> bool:
    found = events(session, job, WorkerLost)
    return any((e.worker, e.incarnation) == (worker, incarnation) for e in found)
