"""Measure one worker with a policy of the shape of Qwen2.5-0.5B: whole steps, and its stops.

`python -m benchmarks.real_shape --out F.json`

The policy has random weights, the full vocabulary and a context of 2,048 tokens; rollouts are few
and short. First a whole job runs, with drafters trained and evaluated, and the memory of its rank
is watched. Then a rank by itself trains the drafter on long answers and is stopped at random.
"""

import argparse
import asyncio
import random
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch

from benchmarks.lone_rank import LoneRank
from benchmarks.random_policy import HALF_BILLION, write_job, write_policy
from benchmarks.result import Claim, write_result
from benchmarks.stacks import Job, run, session
from tlt.config import DrafterSpec, JobSpec
from tlt.models.config_json import read_config
from tlt.models.eagle_drafter import new_drafter
from tlt.session_client import with_client
from tlt.spec_files import load_job_spec
from tlt.trainer.drafter.initial_drafter import drafter_config_for

_JOB = "real-shape"
_CONTEXT = 2048
_ANSWERS, _TOKENS = 4, 96
_STEPS = 3
# micro-batches; a step has a few
_MERGED = 4
_STOPS = 40
_SESSION_SECONDS = (0.5, 9.0)
_LONG_ANSWERS, _LONG_TOKENS = 2, 300
_ALONE = [
    "speculation.mode=adaptive",
    "drafter.train=always",
    f"rollout.max_new_tokens={_LONG_TOKENS}",
]
_FOUR_BYTES = 4
# copies of a drafter: weights, mean and momentum; root, base and four snapshots, each with its
# mean; the one in use
_DRAFTERS = 3 + 2 * (1 + 1 + 4) + 1
# a slow reward function: the worker idles while it waits for the last score
_COIN = """
import time

def coin(completion, **_):
    time.sleep(6)
    return float(len(completion) % 2)
"""
# measured over stated memory: allocators keep something
_ROOM = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tlt-bench-") as name:
        folder = Path(name)
        numbers = write_policy(folder / "policy", HALF_BILLION)
        stated = _stated_bytes(numbers, _drafter_bytes(folder / "policy"))
        spec = _write_spec(folder)
        with session(workers=1), _watch_memory() as seen:
            job = run(
                "cold", 1, "drafter.train=always", f"drafter.merge_every={_MERGED}", spec=spec
            )
        alone = asyncio.run(_measure_stops(folder, load_job_spec(spec, _ALONE)))
    assert job.snapshot.drafter_training is not None
    p95 = quantiles(alone.waits, n=20)[-1]
    claims = [
        Claim(
            name="real_shape.obeyed_p95", value=1000 * p95, unit="ms", bar=150, less_is_better=True
        ),
        Claim(
            name="real_shape.memory",
            value=max(seen) / sum(stated.values()),
            unit="of the stated bytes",
            bar=_ROOM,
            less_is_better=True,
        ),
        Claim(
            name="real_shape.micro_batches",
            value=job.snapshot.drafter_training.micro_batches,
            unit="in the job",
            bar=1,
        ),
        Claim(
            name="real_shape.measured",
            value=len(job.snapshot.drafter_training.evaluations),
            unit="drafters in the job",
            bar=1,
        ),
        Claim(
            name="real_shape.kept",
            value=alone.kept,
            unit="micro-batches beside the stops",
            bar=8,
        ),
        Claim(
            name="real_shape.state_bytes",
            value=alone.state_bytes / (HALF_BILLION.hidden * _FOUR_BYTES),
            unit="of the stated bytes",
            bar=1.0,
            less_is_better=True,
        ),
    ]
    details = {
        "steps": [(round(s.rollout, 1), round(s.rest, 1)) for s in job.steps],
        "phases": {phase: round(s, 1) for phase, s in job.snapshot.phases.items()},
        "stopped_after_ms": [round(1000 * wait, 1) for wait in sorted(alone.waits)],
        "micro_batch_seconds": round(median(alone.typical), 3),
        "memory_stated_bytes": stated,
        "memory_peak_bytes": max(seen),
        "state_bytes_per_token": alone.state_bytes,
        "state_bytes_per_token_stated": HALF_BILLION.hidden * _FOUR_BYTES,
        "drafter": _drafter(job),
    }
    write_result("real_shape", claims, details, time.monotonic() - began, out)


def _write_spec(folder: Path) -> Path:
    """Write a spec whose reward is a coin: 1 for an odd number of characters, else 0."""
    return write_job(
        folder,
        _JOB,
        _COIN,
        policy={"max_context": _CONTEXT},
        algorithm={
            "steps": _STEPS,
            "prompts_per_step": 1,
            "group_size": _ANSWERS,
            "microbatch_tokens": 512,
            "checkpoint_every": 1000,
        },
        rollout={"max_new_tokens": _TOKENS, "slots": _ANSWERS},
        workers={"stuck_seconds": 600},
    )


@contextmanager
def _watch_memory() -> Generator[list[int]]:
    """Yield a list that grows by the peak memory of the ranks, in bytes, each second."""
    seen, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            workers = with_client("default", lambda client: client.workers())
            for pid in (pid for beat in workers.values() for pid in beat.rank_pids):
                seen.append(_peak(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _peak(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)


def _stated_bytes(numbers: int, drafter: int) -> dict[str, int]:
    """Return the memory that a rank of this job needs, in bytes."""
    weights = numbers * _FOUR_BYTES
    return {
        "policy_to_decode_with": weights,
        "policy_to_learn": weights,
        "gradients": weights,
        "moments": 2 * weights,
        "weights_on_their_way": weights,
        "logits_of_a_micro_batch": 512 * HALF_BILLION.vocabulary * _FOUR_BYTES,
        "drafter": _DRAFTERS * drafter,
        "torch_and_the_rest": 1 << 30,
    }


def _drafter_bytes(policy: Path) -> int:
    config = drafter_config_for(read_config(policy), DrafterSpec().layout)
    with torch.device("meta"):
        drafter = new_drafter(config)
    return sum(parameter.nbytes for parameter in drafter.parameters())


def _drafter(job: Job) -> dict[str, Any]:
    found = job.snapshot.drafter_training
    assert found is not None
    return {
        "bought_seconds": round(found.reserved, 1),
        "preempted": found.stops,
        "preempt_p99_ms": round(1000 * found.stop_p99, 1),
        "micro_batches": found.micro_batches,
        "typical_seconds": round(found.median_seconds, 3),
        "canaries": [round(m.accept_length, 3) for m in found.evaluations],
    }


# --- a rank by itself


class _Stops(NamedTuple):
    # seconds from each stop command until the rank had stopped
    waits: list[float]
    # duration of a micro-batch, as the rank reported it at each stop
    typical: list[float]
    # micro-batches that it published
    kept: int
    # bytes of captured states per token
    state_bytes: float


async def _measure_stops(folder: Path, spec: JobSpec) -> _Stops:
    rank = await LoneRank.start(folder, spec, "cpu", _JOB)
    prompt = range(10, 50)
    done = await rank.decode([prompt], _LONG_ANSWERS)
    tokens = sum(len(prompt) + answer.length - 1 for answer in done)
    states = folder / "flight" / _JOB / "states"
    captured = sum(file.stat().st_size for file in states.iterdir())
    dice, waits, typical, kept = random.Random(1), list[float](), list[float](), 0
    for number in range(1, _STOPS + 1):
        rank.train_drafter(number)
        # the first micro-batches are long, until their size is adapted
        await asyncio.sleep(20.0 if number == 1 else dice.uniform(*_SESSION_SECONDS))
        sent = time.monotonic()
        stopped, deltas = await rank.stop_training(number)
        waits.append(time.monotonic() - sent)
        kept += sum(delta.updates for delta in deltas)
        if stopped.typical_seconds:
            typical.append(stopped.typical_seconds)
    rank.close()
    return _Stops(waits, typical, kept, captured / tokens)


if __name__ == "__main__":
    main()
