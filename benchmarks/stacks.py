"""Run whole jobs with one stack or another, and read the seconds of their steps.

Jobs are submitted and awaited in this process with the functions behind `tlt submit` and `tlt
jobs`, because starting a command takes seconds.

A stack is a set of all settings that affect a step's speed. Jobs with the same seed have the same
prompts and noise, hence the same answers, and their steps can be compared one by one.
"""

import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

from cli.config import load_job
from tlt.errors import StoreError
from tlt.protocol.shared_values import JobRecord
from tlt.report import Snapshot
from tlt.runs.run_folder_reader import read_snapshot
from tlt.session.client import with_client
from tlt.store.job_requests import ENDED_STATUSES

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "benchmarks" / "reasoner.yaml"
_DRAFTER = ROOT / "examples" / "tiny_reasoner" / "drafter"
_SPECULATES = ("speculation.mode=adaptive",)
_POLL_SECONDS, _STALL_SECONDS = 0.5, 60.0
_RESAMPLES = 2000

STACKS: dict[str, tuple[str, ...]] = {
    # what a spec that says nothing gets
    "default": (),
    "off": ("speculation.mode=off",),
    "n-gram": (*_SPECULATES, "speculation.depths=[]"),
    # fully trained before the job, and not in it
    "frozen": (*_SPECULATES, f"drafter.path={_DRAFTER}", "drafter.train=off"),
    "warm": (*_SPECULATES, f"drafter.path={_DRAFTER}", "drafter.train=auto"),
    "cold": (*_SPECULATES, "drafter.train=auto"),
    # idle workers always train
    "idle-only": (*_SPECULATES, "drafter.train=always"),
    "forced": (*_SPECULATES, f"drafter.path={_DRAFTER}", "drafter.train=always"),
}


class StepTime(NamedTuple):
    rollout: float
    # until the new policy is published
    rest: float

    @property
    def whole(self) -> float:
        return self.rollout + self.rest


class Job(NamedTuple):
    stack: str
    seed: int
    steps: list[StepTime]
    snapshot: Snapshot
    folder: Path


@contextmanager
def session(workers: int = 2, device: str = "cpu", folder: Path | None = None) -> Generator[None]:
    """Start a session in a home of its own, in a temporary folder unless one is given."""
    with ExitStack() as stack:
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="tlt-bench-")
            folder = Path(stack.enter_context(temporary))
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["TLT_HOME"] = f"{folder}/home"
        tlt("up", "--workers", str(workers), "--device", device, "--runs", f"{folder}/runs")
        try:
            yield
        finally:
            tlt("down")


def run(stack: str, seed: int, *changes: str, spec: Path = SPEC) -> Job:
    """Run one job from its submission to its end."""
    name, folder = submit(stack, seed, *changes, spec=spec)
    ended = wait(name)
    if ended.status != "done":
        raise SystemExit(f"{stack}, seed {seed}: {ended.error}")
    snapshot = read_snapshot(folder)
    steps = [StepTime(s.rollout_seconds, s.update_seconds or 0.0) for s in snapshot.steps]
    job = Job(stack, seed, steps, snapshot, folder)
    rolled = math.fsum(step.rollout for step in steps)
    whole = math.fsum(step.whole for step in steps)
    what = " ".join((stack, *changes))
    print(f"{what}, seed {seed}: {whole:.1f} s, {rolled:.1f} s of it in rollouts", flush=True)
    return job


def submit(stack: str, seed: int, *changes: str, spec: Path = SPEC) -> tuple[str, Path]:
    """Submit a job; return its name and its run's folder."""
    loaded = load_job(spec, [*STACKS[stack], f"seed={seed}", *changes])
    record = with_client("default", lambda client: client.jobs.submit(loaded))
    return record.job, Path(record.folder)


def wait(job: str) -> JobRecord:
    answered = time.monotonic()
    while True:
        try:
            record = with_client("default", lambda client: client.job(job))
        except StoreError:
            # a stalled disk delays Redis; the job goes on
            if time.monotonic() > answered + _STALL_SECONDS:
                raise
        else:
            answered = time.monotonic()
            if record.status in ENDED_STATUSES:
                return record
        time.sleep(_POLL_SECONDS)


def tlt(*arguments: str) -> str:
    command = [sys.executable, "-m", "cli.main", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


class Ratio(NamedTuple):
    value: float
    # 95 % bootstrap interval over jobs and their steps
    low: float
    high: float


def ratio(
    above: Sequence[Job],
    below: Sequence[Job],
    part: Callable[[StepTime], float],
    steps: int | None = None,
) -> Ratio:
    """Return the ratio of the seconds of steps with equal seed and number."""
    jobs = [
        [
            (part(one), part(other))
            for one, other in zip(job.steps[:steps], against.steps[:steps], strict=False)
        ]
        for job in above
        for against in below
        if against.seed == job.seed
    ]
    dice = random.Random(1)
    again = [
        _quotient([dice.choices(job, k=len(job)) for job in dice.choices(jobs, k=len(jobs))])
        for _ in range(_RESAMPLES)
    ]
    cuts = quantiles(again, n=40)
    return Ratio(_quotient(jobs), cuts[0], cuts[-1])


def _quotient(jobs: Sequence[Sequence[tuple[float, float]]]) -> float:
    pairs = [pair for job in jobs for pair in job]
    return math.fsum(a for a, _ in pairs) / math.fsum(b for _, b in pairs)
