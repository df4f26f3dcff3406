"""Supervise a session: Redis, Ray and the actors start with this process and end with it.

Run as `python -m tlt.actors.session_supervisor FOLDER`. A lock on the folder allows only one.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import structlog

from tlt.errors import TltError
from tlt.json_logs import write_logs_to
from tlt.session_files import Ready, load_session, short_folder, write_ready
from tlt.store.embedded_redis import EmbeddedRedis
from tlt.store.heartbeats import read_heartbeats
from tlt.store.journal import check_schema
from tlt.store.redis_connection import check, connect
from tlt.store.redis_keys import Keys

_START_SECONDS = 180.0
_LOCK_SECONDS = 1.0
# A session runs on one host, so no part of it listens on other addresses.
_HOST = "127.0.0.1"
_log = structlog.get_logger("supervisor")


class SessionSupervisor:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = load_session(folder)
        self.short = short_folder(folder)
        self.redis: EmbeddedRedis | None = None
        self._lock: BinaryIO | None = None
        self._actors: list[Any] = []

    def start(self) -> None:
        self.short.mkdir(mode=0o700, exist_ok=True)
        if self.spec.redis_url.startswith("unix://") and self._owns_redis():
            self.redis = EmbeddedRedis(self.folder / "redis", self.short / "redis.sock")
            self.redis.start()
        asyncio.run(self._check_redis())
        self._start_ray()
        self._start_actors()
        asyncio.run(self._await_workers())
        write_ready(self.folder, Ready(pid=os.getpid(), error=None))

    def supervise(self, stop: threading.Event) -> None:
        """Restart the embedded Redis whenever it ends; Ray restarts its actors itself."""
        while not stop.wait(0.2):
            if self.redis is not None and not self.redis.running:
                _log.warning("redis ended, starting it again")
                with contextlib.suppress(OSError):
                    self.redis.socket_path.unlink()
                self.redis.start()

    def stop(self) -> None:
        if "ray" in sys.modules:
            import ray

            # Ray takes half a minute to shut down while actors run.
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
            ray.shutdown()
        if self.redis is not None:
            self.redis.stop()
        shutil.rmtree(self.spec.flight, ignore_errors=True)
        shutil.rmtree(self.short, ignore_errors=True)

    def take_lock(self) -> None:
        self._lock = open(self.folder / "lock", "ab")  # noqa: SIM115
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                # `is_up` holds the lock for an instant.
                if time.monotonic() > deadline:
                    raise TltError(f"session '{self.spec.name}' is already up") from error
                time.sleep(0.01)

    def _owns_redis(self) -> bool:
        return self.spec.redis_url == f"unix://{self.short / 'redis.sock'}"

    async def _check_redis(self) -> None:
        connection = connect(self.spec.redis_url)
        try:
            await check(connection, self.spec.redis_url)
            # heartbeats left by an earlier session would count as workers of this one
            await connection.delete(Keys(self.spec.name).heartbeats)
        finally:
            await connection.aclose()

    def _start_ray(self) -> None:
        os.environ["RAY_AUTH_MODE"] = "token"
        token = self.folder / "ray-token"
        if not token.exists():
            token.touch(mode=0o600)
            token.write_text(os.urandom(32).hex())
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        # By default Ray runs its workers, and so the ranks, at a lower priority.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
        import ray

        ray.init(
            address="local",
            _node_ip_address=_HOST,
            num_cpus=self.spec.workers * self.spec.ranks_per_worker,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(self.short / "ray"),
            object_store_memory=80 * 1024 * 1024,
        )

    def _start_actors(self) -> None:
        from tlt.actors.ray_actors import CoordinatorActor, RewardActor, WorkerActor

        session = msgspec.msgpack.encode(self.spec)
        coordinator: Any = CoordinatorActor
        reward: Any = RewardActor
        worker: Any = WorkerActor
        self._actors = [coordinator.remote(session), reward.remote(session)]
        per_worker = self.spec.ranks_per_worker
        on_gpu = self.spec.device == "cuda"
        for index, cores in enumerate(pinned_cores(self.spec.workers, per_worker)):
            options = {"num_cpus": per_worker, "num_gpus": per_worker if on_gpu else 0}
            name = f"w{index}"
            self._actors.append(worker.options(**options).remote(session, name, _HOST, cores))

    async def _await_workers(self) -> None:
        connection = connect(self.spec.redis_url)
        deadline = time.monotonic() + _START_SECONDS
        try:
            while True:
                up = (await read_heartbeats(connection, Keys(self.spec.name))).values()
                if sum(bool(heartbeat.rank_pids) for heartbeat in up) >= self.spec.workers:
                    return
                if time.monotonic() > deadline:
                    raise TltError(
                        f"{len(up)} of {self.spec.workers} workers came up within "
                        f"{_START_SECONDS:.0f} s; see {self.folder / 'logs'}"
                    )
                await asyncio.sleep(0.05)
        finally:
            await connection.aclose()


def pinned_cores(workers: int, ranks: int) -> list[list[list[int]]]:
    """Return the cores of each worker's ranks, or no cores if there are fewer than ranks."""
    available = sorted(os.sched_getaffinity(0))
    each = len(available) // (workers * ranks)
    return [
        [
            available[(worker * ranks + rank) * each : (worker * ranks + rank + 1) * each]
            for rank in range(ranks)
        ]
        for worker in range(workers)
    ]


def main() -> None:
    folder = Path(sys.argv[1])
    write_logs_to(folder / "logs", "supervisor")
    stop = threading.Event()
    _stop_on_signals(stop)
    supervisor = SessionSupervisor(folder)
    try:
        supervisor.take_lock()
    except TltError as error:  # another supervisor uses the folder, so change nothing in it
        raise SystemExit(f"tlt: {error}") from error
    try:
        check_schema(folder / "session")
    except TltError as error:  # the older version may go on with what lies in shared memory
        write_ready(folder, Ready(pid=os.getpid(), error=str(error)))
        raise SystemExit(1) from error
    try:
        supervisor.start()
        _stop_on_signals(stop)  # ray.init installs handlers that exit at once
        supervisor.supervise(stop)
    except Exception as error:  # `tlt up` waits for the session and prints it
        _log.exception("the session cannot go on")
        complaint = str(error) if isinstance(error, TltError) else repr(error)
        write_ready(folder, Ready(pid=os.getpid(), error=complaint))
        raise SystemExit(1) from error
    finally:
        supervisor.stop()


def _stop_on_signals(stop: threading.Event) -> None:
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, lambda *_: stop.set())


if __name__ == "__main__":
    main()
