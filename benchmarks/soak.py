"""Let jobs come and go for half an hour, kill a process a minute, and measure what grows.

`python -m benchmarks.soak --minutes 30 --seed 1 --out F.json --plot F.png`

Two workers of one rank. Memory, open files, shared memory, Redis and logs are sampled; slopes
leave out the first eight jobs of the soak, and of the life of a process that was started again.
`--again RESULT --folder F` fits the slopes of an earlier soak anew, from the samples in F.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, NoReturn

import msgspec

from benchmarks.result import Claim, at_most, write_result
from benchmarks.soak_jobs import SPEC, Jobs, failures
from benchmarks.soak_plot import draw
from benchmarks.soak_samples import Sample, sample_ranks, take_sample
from benchmarks.soak_slopes import Point, Slope, fit_slope
from benchmarks.stacks import session
from tlt.base.end_session_processes import ProcessId
from tlt.errors import StoreError
from tlt.session.client import Client, with_client
from tlt.session.control import find_session
from tlt.session.fault_log import read_supervised
from tlt.store.job_requests import ENDED_STATUSES

_SAMPLE_SECONDS, _POLL_SECONDS, _KILL_SECONDS = 5.0, 1.0, 60.0
_LAST_SECONDS = 60.0
_BLOCK_SECONDS = 60.0
# those at the beginning of the soak, and of a later life, that slopes leave out
_FIRST_JOBS = 8
# in each quarter of an hour; slopes within a rank's life need lives of some jobs
_KILLED = (
    *("coordinator",) * 4,
    *("reward",) * 4,
    *("Redis",) * 4,
    *("a worker", "a rank", "Ray's raylet"),
)
# eight are measured at least
_JOBS = 2 * _FIRST_JOBS
_MEGABYTES_A_MINUTE = 1.0
_FILES_A_MINUTE = 0.5
_BOUNDED = (
    *("shared memory, MB", "Redis's memory, MB", "Redis's file, MB", "logs, MB"),
    *("session's journal, MB", "Ray's files, MB", "scratch files, MB"),
)


class Kill(NamedTuple):
    at: float
    what: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the session's files and samples there")
    parser.add_argument("--again", type=Path, help="result of the soak whose samples are there")
    arguments = parser.parse_args()
    if arguments.again is not None:
        _fit_again(json.loads(arguments.again.read_bytes()), arguments.folder, arguments.out)
    began = time.monotonic()
    random = Random(arguments.seed)
    with session(folder=arguments.folder):
        jobs = Jobs(random)
        samples, kills = _soak(jobs, random, arguments.minutes, arguments.folder)
        jobs.cancel_all()
    if arguments.plot is not None:
        draw(samples, kills, arguments.plot)
    statuses = Counter(record.status for record in jobs.records.values())
    details: dict[str, Any] = {
        "seed": arguments.seed,
        "minutes": arguments.minutes,
        "jobs": dict(statuses),
        "kills": dict(Counter(kill.what for kill in kills)),
        "failures": failures(jobs),
        "spec": SPEC.name,
        "load": os.getloadavg()[2],
    }
    _write(samples, details, time.monotonic() - began, arguments.out)


def _fit_again(earlier: dict[str, Any], folder: Path, out: Path | None) -> NoReturn:
    with open(folder / "samples.jsonl", "rb") as file:
        samples = [msgspec.json.decode(line, type=Sample) for line in file]
    details = {"sampled_at": earlier["commit"], **earlier["details"]}
    _write(samples, details, earlier["seconds"], out)


def _write(
    samples: Sequence[Sample], details: dict[str, Any], seconds: float, out: Path | None
) -> NoReturn:
    slopes = _slopes(samples, details["seed"])
    rounded = {
        kind: {name: _rounded(slope) for name, slope in sorted(found.items())}
        for kind, found in slopes.items()
    }
    claims = _claims(slopes, details["jobs"], details["kills"], details["minutes"])
    write_result("soak", claims, {**details, "slopes": rounded}, seconds, out)


# --- half an hour


def _soak(
    jobs: Jobs, random: Random, minutes: float, folder: Path | None
) -> tuple[list[Sample], list[Kill]]:
    spec = find_session("default")
    began = time.monotonic()
    end = began + 60 * minutes
    samples: list[Sample] = []
    whole: Sample | None = None
    kills: list[Kill] = []
    deck: list[str] = []
    due, kill_due = began, began + _KILL_SECONDS
    while (now := time.monotonic()) < end:
        jobs.tend(submit=True)
        if now >= due:
            due += _SAMPLE_SECONDS
            samples.append(whole := take_sample(spec, now - began, jobs.ended))
            _append(folder, "samples.jsonl", samples[-1])
        elif whole is not None:
            samples.append(sample_ranks(whole, now - began, jobs.ended))
            _append(folder, "samples.jsonl", samples[-1])
        if kill_due <= now < end - _LAST_SECONDS:
            kill_due += _KILL_SECONDS
            deck = deck or random.sample(_KILLED, len(_KILLED))
            kills.append(Kill(round(now - began, 1), _kill(deck.pop(), random)))
            _append(folder, "kills.jsonl", kills[-1])
            print(f"{now - began:.0f} s: {jobs.ended} jobs, {kills[-1].what} killed", flush=True)
        time.sleep(max(0.0, _POLL_SECONDS - (time.monotonic() - now)))
    return samples, kills


def _kill(what: str, random: Random) -> str:
    """Kill a process; where one isn't known at the moment, kill the one that is next to it."""
    supervised = read_supervised(Path(find_session("default").folder)).processes
    pids = {name: process.pid for name, process in supervised.items()}

    async def actors(client: Client) -> Mapping[str, int]:
        services, workers = await client.services(), await client.workers()
        found = {name: beat.pid for name, beat in services.items()}
        ranks = [pid for beat in workers.values() for pid in beat.rank_pids]
        if workers:
            found["a worker"] = random.choice(sorted(beat.pid for beat in workers.values()))
        if ranks:
            found["a rank"] = random.choice(ranks)
        return found

    with contextlib.suppress(StoreError):
        pids |= with_client("default", actors)
    killed = what if what in pids else "Redis"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[killed], signal.SIGKILL)
    return killed


def _append(folder: Path | None, name: str, what: object) -> None:
    if folder is not None:
        with open(folder / name, "ab") as file:
            file.write(msgspec.json.encode(what) + b"\n")


# --- what has grown


def _slopes(samples: Sequence[Sample], seed: int) -> dict[str, dict[str, Slope]]:
    """Fit what processes and the session keep: the lowest value of each minute, or longer job.

    What a job itself takes comes and goes, and depends on its shape. The last minute of a process
    is left out: it may end before it has released what its job took.
    """
    block, block_at, block_jobs = 0, 0.0, 0
    kept: dict[tuple[str, str], dict[tuple[int, int], Point]] = defaultdict(dict)
    lives: dict[ProcessId, int] = {}
    first_jobs: dict[int, int] = {}
    for sample in samples:
        if sample.jobs > block_jobs and sample.at - block_at >= _BLOCK_SECONDS:
            block, block_at, block_jobs = block + 1, sample.at, sample.jobs
        for each in sample.processes:
            life = lives.setdefault(each.process, len(lives) + 1)
            first = first_jobs.setdefault(life, sample.jobs)
            since = first + _FIRST_JOBS
            for kind, value in (("memory", each.anonymous_mb), ("open files", each.files)):
                if sample.jobs >= since:
                    point = Point(life, block, sample.at / 60, value)
                    _keep_lowest(kept[kind, each.role], point)
        totals = dict(sample.totals)
        if totals:
            totals["memory of all processes, MB"] = math.fsum(
                each.anonymous_mb for each in sample.processes
            )
        for name, value in totals.items():
            if sample.jobs >= _FIRST_JOBS:
                point = Point(0, block, sample.at / 60, value)
                _keep_lowest(kept["session", name], point)
    slopes: dict[str, dict[str, Slope]] = defaultdict(dict)
    for (kind, name), points in kept.items():
        last: dict[int, int] = {}
        for life, minute in points:
            last[life] = max(minute, last.get(life, 0))
        whole = [point for point in points.values() if point.job < last[point.life]]
        if (slope := fit_slope(whole, seed)) is not None:
            slopes[kind][name] = slope
    return slopes


def _keep_lowest(points: dict[tuple[int, int], Point], point: Point) -> None:
    place = point.life, point.job
    if place not in points or point.value < points[place].value:
        points[place] = point


def _claims(
    slopes: Mapping[str, Mapping[str, Slope]],
    jobs: Mapping[str, int],
    kills: Mapping[str, int],
    minutes: float,
) -> list[Claim]:
    bounded = {f"memory.{role}": slope for role, slope in slopes.get("memory", {}).items()}
    bounded |= {
        name.removesuffix(", MB"): slope
        for name, slope in slopes.get("session", {}).items()
        if name in _BOUNDED
    }
    found = [
        Claim(
            name=f"soak.{name}",
            value=slope.value,
            unit="MB a minute",
            bar=_MEGABYTES_A_MINUTE,
            less_is_better=True,
        )
        for name, slope in sorted(bounded.items())
    ]
    found += [
        Claim(
            name=f"soak.open_files.{role}",
            value=slope.value,
            unit="files a minute",
            bar=_FILES_A_MINUTE,
            less_is_better=True,
        )
        for role, slope in sorted(slopes.get("open files", {}).items())
    ]
    ended = sum(count for status, count in jobs.items() if status in ENDED_STATUSES)
    return [
        Claim(name="soak.jobs", value=ended, unit="jobs", bar=_JOBS),
        Claim(name="soak.kills", value=sum(kills.values()), unit="kills", bar=minutes - 2),
        at_most("soak.failed", jobs.get("failed", 0), "jobs", 0),
        *found,
    ]


def _rounded(slope: Slope) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in slope._asdict().items()}


if __name__ == "__main__":
    main()
