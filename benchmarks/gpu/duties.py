"""Lead a rank through its duties: rollouts, drafter training to adoption, a policy update.

The drafter's part has the width of an 8B policy in two layers, because a drafter, its deltas and
their cost depend on the width alone. The duties' part has all layers of a 1.5B policy.
"""

import asyncio
import math
import random
import tempfile
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import torch

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Check, Figures, beside, require
from benchmarks.lone_rank import NEW_DRAFTER, LoneRank
from benchmarks.random_policy import WIDE, write_job
from tlt.models.config_json import read_config
from tlt.models.decoder_spec import weight_shapes
from tlt.models.eagle_drafter import new_drafter
from tlt.protocol.events import RolloutFinished
from tlt.spec.config import HOT_TOKENS
from tlt.spec.spec_files import load_job_spec
from tlt.trainer.drafter.initial_drafter import drafter_config_for

_PROMPTS, _MEMBERS = [range(10 + i, 50 + i) for i in range(4)], 4
_TOKENS, _CONTEXT, _SLOTS = 160, 512, 16
# differences of the weights and of their running mean, in bfloat16
_DELTA_BYTES = 2 * 2
# a delta, and a merge of two, may take this many times the seconds of copying as many bytes
_COPIES = 3
# operations for a token and a weight: 22e9 for a 32B policy's drafter, of 540 million (arithmetic)
_TRAINED = 40
# operations that the native engine launches in a layer, and in eager mode nothing hides them
_LAUNCHES = 15
# trained on this share of the data sheet's operations; drafters in TF32, at half of its rate
_USED, _TF32 = 0.3, 0.5
_STOPS, _STOP_SECONDS, _BETWEEN = 6, 0.15, (0.3, 1.5)


@contextmanager
def _checks(
    machine: Machine, engine: Literal["native", "sglang"], wide: bool = False
) -> Generator[Mapping[str, Check]]:
    policy = machine.policy(WIDE if wide and machine.has_gpu else None)
    with tempfile.TemporaryDirectory(dir=machine.folder) as folder, asyncio.Runner() as runner:
        spec = write_job(
            Path(folder),
            "gpu",
            policy={"path": str(policy), "max_context": _CONTEXT},
            algorithm={
                "steps": 1,
                "prompts_per_step": len(_PROMPTS),
                "group_size": _MEMBERS,
                # it may take minutes
                "compile": False,
            },
            rollout={"engine": engine, "max_new_tokens": _TOKENS, "slots": _SLOTS},
            speculation={"mode": "adaptive"},
            drafter={"train": "always", "merge_every": 4},
            workers={"stuck_seconds": 300},
        )
        started = LoneRank.start(Path(folder), load_job_spec(spec), str(machine.device), "gpu")
        duties = _Duties(machine, policy, runner.run(started))
        checks = {
            "first rollout": duties.roll_out,
            "drafter trained, merged, adopted": duties.train,
            "drafter training stopped": duties.stop,
        }
        if not wide:
            checks |= {"policy update": duties.update, "second rollout": duties.roll_out}
        yield {name: partial(_run, runner, check) for name, check in checks.items()}
        duties.rank.close()


wide_drafter = partial(_checks, engine="native", wide=True)
native_duties = partial(_checks, engine="native")
sglang_duties = partial(_checks, engine="sglang")


def _run(runner: asyncio.Runner, check: Callable[[], Coroutine[Any, Any, Figures]]) -> Figures:
    return runner.run(check())


class _Duties:
    def __init__(self, machine: Machine, policy: Path, rank: LoneRank) -> None:
        self.rank = rank
        self._machine = machine
        self._config = config = read_config(policy)
        self._weights = sum(map(math.prod, weight_shapes(config).values()))
        with torch.device("meta"):
            drafter = new_drafter(drafter_config_for(config, "eagle", HOT_TOKENS))
        self._drafter_weights = sum(weight.numel() for weight in drafter.parameters())
        self._answers: list[RolloutFinished] = []
        self._base = NEW_DRAFTER

    async def roll_out(self) -> Figures:
        began = time.monotonic()
        self._answers = await self.rank.decode(_PROMPTS, _MEMBERS)
        sheet, size = self._machine.sheet, self._weights * self._machine.dtype.itemsize
        launching = self._config.layers * _LAUNCHES * sheet.launch
        steps = max(answer.length for answer in self._answers)
        step = max(size / sheet.bandwidth, launching)
        return {"seconds": beside(time.monotonic() - began, steps * step), **self._memory()}

    async def train(self) -> Figures:
        """Train on all prompts' answers but the first's, which are held out; merge and adopt."""
        rank, sheet = self.rank, self._machine.sheet
        rank.train_drafter(1, held_out=[0])
        ready = await rank.next_delta()
        merged = await rank.merge_drafter(1, [ready.delta])
        stopped, _ = await rank.stop_training(1)
        began = time.monotonic()
        await rank.adopt_drafter(merged.drafter)
        adopted = time.monotonic() - began
        self._base, evaluation = merged.base, merged.evaluation
        require(evaluation.answers == _MEMBERS, f"{evaluation.answers} answers evaluated it")
        require(evaluation.accept_length >= 1, f"the accept length is {evaluation.accept_length}")
        size = ready.delta.blob.bytes
        copied = _copy_seconds(size, self._machine.folder)
        speed = sum(msgspec.structs.astuple(ready.tokens)) / ready.seconds
        rate = sheet.bfloat16 * (_TF32 * _USED if self._machine.has_gpu else 1.0)
        return {
            "drafter_weights": self._drafter_weights,
            "delta_bytes": beside(size, _DELTA_BYTES * self._drafter_weights),
            "delta_seconds": beside(ready.publishing_seconds, _COPIES * copied),
            "merge_and_evaluation_seconds": beside(merged.seconds, 2 * _COPIES * copied),
            "adoption_seconds": beside(adopted, copied),
            "tokens_per_second": beside(speed, rate / _TRAINED / self._drafter_weights),
            "micro_batch_seconds": round(stopped.median_seconds, 4),
            **self._memory(),
        }

    async def stop(self) -> Figures:
        """Stop training sessions at random."""
        dice, waits = random.Random(1), list[float]()
        for session in range(2, 2 + _STOPS):
            self.rank.train_drafter(session, self._base)
            await asyncio.sleep(dice.uniform(*_BETWEEN))
            sent = time.monotonic()
            await self.rank.stop_training(session)
            waits.append(time.monotonic() - sent)
        half = median(waits)
        require(half <= _STOP_SECONDS, f"half of the stops took over {half:.3f} s")
        return {"median_seconds": beside(half, _STOP_SECONDS), "worst_seconds": max(waits)}

    async def update(self) -> Figures:
        """Load the learner, update the policy, and give it to the engine."""
        began = time.monotonic()
        await self.rank.update_policy(self._answers)
        took = time.monotonic() - began
        tokens = sum(answer.length + answer.prompt_length for answer in self._answers)
        rate = self._machine.sheet.bfloat16 * (_USED if self._machine.has_gpu else 1.0)
        return {"seconds": beside(took, 8 * self._weights * tokens / rate), **self._memory()}

    def _memory(self) -> Figures:
        return {"gigabytes_free": round(self._machine.free_bytes() / 1e9, 2)}


def _copy_seconds(size: int, folder: Path) -> float:
    """Return how long it takes to write so many bytes into a new file in memory."""
    data, file = torch.ones(size, dtype=torch.uint8).numpy().data, folder / "copied"
    began = time.monotonic()
    file.write_bytes(data)
    took = time.monotonic() - began
    file.unlink()
    return took
