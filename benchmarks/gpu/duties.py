"""Lead one device through all duties: rollout, drafter training, policy update, rollout."""

import asyncio
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch

from benchmarks.gpu.parts import Check, Figures, Machine
from benchmarks.lone_rank import LoneRank
from benchmarks.random_policy import HALF_BILLION, TINY, write_job, write_policy
from tlt.spec.spec_files import load_job_spec

_PROMPTS, _MEMBERS = [range(10 + i, 50 + i) for i in range(4)], 4
_TRAINING_SECONDS = 3.0


@contextmanager
def checks(machine: Machine) -> Generator[Mapping[str, Check]]:
    write_policy(machine.folder / "policy", HALF_BILLION if machine.has_gpu else TINY)
    yield {
        f"with {engine}": partial(asyncio.run, _go_round(machine, engine))
        for engine in ("native", "sglang")
    }


async def _go_round(machine: Machine, engine: Literal["native", "sglang"]) -> Figures:
    spec = write_job(
        machine.folder,
        f"gpu-{engine}",
        policy={"max_context": 512},
        algorithm={"steps": 1, "prompts_per_step": 4, "group_size": _MEMBERS},
        rollout={"engine": engine, "max_new_tokens": 128, "slots": 16},
        speculation={"mode": "adaptive"},
        drafter={"train": "always", "merge_every": 4},
        workers={"stuck_seconds": 300},
    )
    name = str(machine.device)
    folder = machine.folder / engine
    rank = await LoneRank.start(folder, load_job_spec(spec), name, f"gpu-{engine}")
    figures: Figures = {}

    def note(duty: str, began: float) -> None:
        figures[f"{duty}, seconds"] = round(time.monotonic() - began, 2)
        if machine.has_gpu:
            free, total = torch.cuda.mem_get_info(machine.device)
            figures[f"{duty}, gigabytes"] = round((total - free) / 1e9, 2)

    for turn in ("first", "second"):
        began = time.monotonic()
        answers = await rank.decode(_PROMPTS, _MEMBERS)
        note(f"{turn} rollout", began)
        if turn == "first":
            began = time.monotonic()
            rank.train_drafter(1)
            delta = await rank.next_delta()
            await asyncio.sleep(_TRAINING_SECONDS)
            stopped, _ = await rank.stop_training(1)
            figures["micro_batch_seconds"] = round(stopped.median_seconds, 4)
            figures["updates_in_first_delta"] = delta.updates
            note("drafter training", began)
            began = time.monotonic()
            await rank.update_policy(answers)
            note("policy update", began)
    rank.close()
    return figures
