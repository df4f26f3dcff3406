"""Let a rank train drafters: micro-batches, a merge, an evaluation, and stops at random."""

import asyncio
import random
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from statistics import median

from benchmarks.gpu.parts import Check, Figures, Machine, require
from benchmarks.lone_rank import LoneRank
from benchmarks.random_policy import HALF_BILLION, TINY, write_job, write_policy
from tlt.spec.spec_files import load_job_spec

_PROMPTS, _MEMBERS = (range(10, 50), range(20, 60)), 4
_STOPS = 12
_BETWEEN = (0.3, 1.5)
_STOPPED_SECONDS = 0.15


@contextmanager
def checks(machine: Machine) -> Generator[Mapping[str, Check]]:
    folder = machine.folder
    write_policy(folder / "policy", HALF_BILLION if machine.has_gpu else TINY)
    spec = write_job(
        folder,
        "gpu-drafter",
        policy={"max_context": 1024},
        algorithm={"steps": 1, "prompts_per_step": 2, "group_size": _MEMBERS},
        rollout={"max_new_tokens": 200, "slots": 8},
        speculation={"mode": "adaptive"},
        drafter={"train": "always", "merge_every": 4},
        workers={"stuck_seconds": 300},
    )
    with asyncio.Runner() as runner:
        started = LoneRank.start(folder, load_job_spec(spec), str(machine.device), "gpu-drafter")
        rank = runner.run(started)
        yield {
            "micro-batches, merge, evaluation": lambda: runner.run(_train_and_merge(rank)),
            "stop": lambda: runner.run(_stop_at_random(rank)),
        }
        rank.close()


async def _train_and_merge(rank: LoneRank) -> Figures:
    """Train on both prompts' answers, those to the first of them held out."""
    answers = await rank.decode(_PROMPTS, _MEMBERS)
    rank.train_drafter(1, held_out=[0])
    began = time.monotonic()
    delta = await rank.next_delta()
    trained = time.monotonic() - began
    merged = await rank.merge_drafter(1, [delta.delta])
    stopped, _ = await rank.stop_training(1)
    evaluation = merged.evaluation
    require(evaluation.answers == _MEMBERS, f"{evaluation.answers} answers evaluated it")
    require(evaluation.accept_length >= 1, f"the accept length is {evaluation.accept_length}")
    return {
        "answers": len(answers),
        "micro_batches": delta.updates,
        "seconds_to_first_delta": round(trained, 2),
        "micro_batch_seconds": round(stopped.median_seconds, 4),
        "merge_and_evaluation_seconds": round(merged.seconds, 3),
    }


async def _stop_at_random(rank: LoneRank) -> Figures:
    dice, waits = random.Random(1), list[float]()
    for session in range(2, 2 + _STOPS):
        rank.train_drafter(session)
        await asyncio.sleep(dice.uniform(*_BETWEEN))
        sent = time.monotonic()
        await rank.stop_training(session)
        waits.append(time.monotonic() - sent)
    require(median(waits) <= _STOPPED_SECONDS, f"half of the stops took over {median(waits):.3f} s")
    return {"median_ms": round(1000 * median(waits), 1), "worst_ms": round(1000 * max(waits), 1)}
