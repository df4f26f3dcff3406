"""Sample what a session holds: memory and open files of each process, Redis, disk.

A process's memory is its anonymous memory, shared pages of files left out: what it has allocated.
"""

import contextlib
import json
import os
from collections import Counter
from pathlib import Path

import msgspec
import redis
import redis.exceptions

from tlt.base.end_session_processes import ProcessId, identify, processes_of
from tlt.session.fault_log import read_supervised
from tlt.session.session_files import short_folder
from tlt.spec.config import SessionSpec
from tlt.store.redis_keys import Keys

_MEGABYTE = 1e6
_PROC = Path("/proc")
_REDIS_SECONDS = 2.0
# by what their command line contains, the first that fits
_ROLES = {
    b"tlt.ranks.main": "rank",
    b"tlt.rewards.process.reward_fork_server": "reward child",
    b"tlt.preparation.prepare_job": "preparer",
    b"tlt.runs.run_summary_files": "summary",
    b"tlt.actors.supervisor.ray_head_main": "Ray's driver",
    b"ray::CoordinatorActor": "coordinator",
    b"ray::RewardActor": "reward scorer",
    b"ray::WorkerActor": "worker",
    b"monitor.py": "Ray's agents",
    b"dashboard.py": "Ray's agents",
    b"ray::DashboardAgent": "Ray's agents",
    b"ray::RuntimeEnvAgent": "Ray's agents",
    b"gcs_server": "Ray's GCS",
    b"raylet/raylet": "Ray's raylet",
}


class ProcessSample(msgspec.Struct, frozen=True, kw_only=True):
    process: ProcessId
    role: str
    anonymous_mb: float
    # each shared page counts by the share of its users
    proportional_mb: float
    files: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    # seconds since the soak began
    at: float
    # number of jobs that had ended
    jobs: int
    processes: tuple[ProcessSample, ...]
    # of the whole session, by name
    totals: dict[str, float]


def sample_ranks(earlier: Sample, at: float, jobs: int) -> Sample:
    """Sample only the ranks that were there before: they free memory for moments, between jobs."""
    ranks = (each for each in earlier.processes if each.role == "rank")
    found = (_sample_process(each.process.pid, each.role) for each in ranks)
    processes = tuple(sample for sample in found if sample is not None)
    return Sample(at=round(at, 2), jobs=jobs, processes=processes, totals={})


def take_sample(spec: SessionSpec, at: float, jobs: int) -> Sample:
    processes = tuple(
        sample
        for pid, role in _roles(Path(spec.folder)).items()
        if (sample := _sample_process(pid, role)) is not None
    )
    return Sample(
        at=round(at, 2),
        jobs=jobs,
        processes=processes,
        totals={"processes": len(processes), **_disk(spec), **_redis(spec)},
    )


def _roles(folder: Path) -> dict[int, str]:
    supervised = read_supervised(folder).processes
    roles = {process.pid: name for name, process in supervised.items()}
    with contextlib.suppress(OSError, ValueError):
        roles[json.loads((folder / "dashboard.json").read_bytes())["pid"]] = "dashboard"
    for pid, command in processes_of(folder).items():
        if command and pid not in roles:
            found = (role for part, role in _ROLES.items() if part in command)
            roles[pid] = next(found, "others")
    return roles


def _sample_process(pid: int, role: str) -> ProcessSample | None:
    process = identify(pid)
    if process is None:
        return None
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
        files = len(os.listdir(_PROC / str(pid) / "fd"))
    except OSError:  # it has ended
        return None
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
    return ProcessSample(
        process=process,
        role=role,
        anonymous_mb=kilobytes["Anonymous"] * 1024 / _MEGABYTE,
        proportional_mb=kilobytes["Pss"] * 1024 / _MEGABYTE,
        files=files,
    )


def _disk(spec: SessionSpec) -> dict[str, float]:
    folder, short = Path(spec.folder), short_folder(Path(spec.folder))
    return {
        "shared memory, MB": _megabytes(Path(spec.flight)),
        "logs, MB": _megabytes(folder / "logs"),
        "Redis's file, MB": _megabytes(folder / "redis"),
        "session's journal, MB": _megabytes(folder / "session"),
        "Ray's files, MB": _megabytes(short / "ray"),
        "scratch files, MB": _megabytes(short / "tmp"),
        "scratch files": sum(len(files) for _, _, files in os.walk(short / "tmp")),
        "runs, MB": _megabytes(Path(spec.runs)),
    }


def _megabytes(folder: Path) -> float:
    """Return what a folder's files take on the disk, or in memory."""
    blocks = 0
    for place, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                blocks += os.stat(os.path.join(place, file), follow_symlinks=False).st_blocks
    return blocks * 512 / _MEGABYTE


def _redis(spec: SessionSpec) -> dict[str, float]:
    """Return nothing while Redis is being started again."""
    try:
        with redis.Redis.from_url(spec.redis_url, socket_timeout=_REDIS_SECONDS) as connection:
            found: dict[str, float] = {
                "Redis's memory, MB": connection.info("memory")["used_memory"] / _MEGABYTE,
                "Redis's keys": float(connection.dbsize()),
            }
            lengths: Counter[str] = Counter()
            pattern = Keys(spec.name).pattern
            for key in connection.scan_iter(match=pattern, count=1000, _type="stream"):
                kind = key.decode().split(":")[2]
                lengths[f"entries in {kind}"] += connection.xlen(key)
                lengths[f"streams of {kind}"] += 1
            return {**found, **lengths}
    except redis.exceptions.RedisError:
        return {}
