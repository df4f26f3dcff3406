"""Lead a rank through its duties: rollouts, drafter training to adoption, a policy update.

The drafter's part has the width of an 8B policy in two layers, because a drafter, its deltas and
their cost depend on the width alone. The duties' part has all layers of a 1.5B policy.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from benchmarks.gpu.machine import MOVED, Machine
from benchmarks.gpu.outcomes import Check, Figures, beside
from benchmarks.lone_rank import NEW_DRAFTER, LoneRank
from benchmarks.random_policy import WIDE, write_job
from tlt.protocol.events import RolloutFinished
from tlt.protocol.shared_values import SizingFacts
from tlt.ranks.job_sizes_from_spec import describe_job
from tlt.spec.config import JobSpec
from tlt.spec.spec_files import load_job_spec

_PROMPTS, _MEMBERS = [range(10 + i, 50 + i) for i in range(4)], 4
_TOKENS, _CONTEXT, _SLOTS = 160, 512, 16
# differences of the weights and of their running mean, in bfloat16
_DELTA_BYTES = 2 * 2
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
            # compiling may take minutes
            algorithm={"steps": 1, "prompts_per_step": 4, "group_size": _MEMBERS, "compile": False},
            rollout={"engine": engine, "max_new_tokens": _TOKENS, "slots": _SLOTS},
            speculation={"mode": "adaptive"},
            drafter={"train": "always", "merge_every": 4},
            workers={"stuck_seconds": 300},
        )
        job = load_job_spec(spec)
        started = LoneRank.start(Path(folder), job, str(machine.device), "gpu")
        duties = _Duties(machine, job, runner.run(started))
        checks = {
            "first rollout": duties.roll_out,
            "drafter trained, merged, adopted": duties.train,
            "drafter training stopped": duties.stop,
        }
        if not wide:
            checks |= {"policy update": duties.update, "second rollout": duties.roll_out}
        yield {name: lambda check=check: runner.run(check()) for name, check in checks.items()}
        duties.rank.close()


wide_drafter = partial(_checks, engine="native", wide=True)
native_duties = partial(_checks, engine="native")
sglang_duties = partial(_checks, engine="sglang")


class _Duties:
    def __init__(self, machine: Machine, spec: JobSpec, rank: LoneRank) -> None:
        self.rank = rank
        self._machine, self._sheet = machine, machine.sheet
        job = describe_job(spec, "cpu", SizingFacts(answers=_MEMBERS * len(_PROMPTS)))
        assert job.drafter is not None
        self._policy, self._drafter = job.policy, job.drafter
        self._answers: list[RolloutFinished] = []
        self._base = NEW_DRAFTER

    async def roll_out(self) -> Figures:
        began = time.monotonic()
        self._answers = await self.rank.decode(_PROMPTS, _MEMBERS)
        took = time.monotonic() - began
        read = self._policy.weights * self._machine.dtype.itemsize / self._sheet.bandwidth
        launched = self._policy.layers * _LAUNCHES * self._sheet.launch
        steps = max(answer.length for answer in self._answers)
        return {"seconds": beside(took, steps * max(read, launched))}

    async def train(self) -> Figures:
        """Train on all prompts' answers but the first's, which are held out; merge and adopt."""
        rank, weights = self.rank, self._drafter.weights
        rank.train_drafter(1, held_out=[0])
        ready = await rank.next_delta()
        merged = await rank.merge_drafter(1, [ready.delta])
        await rank.stop_training(1)
        began = time.monotonic()
        await rank.adopt_drafter(merged.drafter)
        adopted = time.monotonic() - began
        self._base, evaluation = merged.base, merged.evaluation
        assert evaluation.answers == _MEMBERS, f"{evaluation.answers} answers evaluated it"
        assert evaluation.accept_length >= 1, f"the accept length is {evaluation.accept_length}"
        size = ready.delta.blob.bytes
        speed = sum(msgspec.structs.astuple(ready.tokens)) / ready.seconds
        rate = self._sheet.bfloat16 * (_TF32 * _USED if self._machine.has_gpu else 1.0)
        return {
            "delta_bytes": beside(size, _DELTA_BYTES * weights),
            "delta_seconds": beside(ready.publishing_seconds, size / MOVED),
            "merge_and_evaluation_seconds": beside(merged.seconds, 2 * size / MOVED),
            "adoption_seconds": beside(adopted, size / MOVED),
            "tokens_per_second": beside(speed, rate / _TRAINED / weights),
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
        assert half <= _STOP_SECONDS, f"half of the stops took over {half:.3f} s"
        return {"median_seconds": beside(half, _STOP_SECONDS), "worst_seconds": max(waits)}

    async def update(self) -> Figures:
        """Load the learner, update the policy, and give it to the engine."""
        began = time.monotonic()
        await self.rank.update_policy(self._answers)
        took = time.monotonic() - began
        tokens = sum(answer.length + answer.prompt_length for answer in self._answers)
        rate = self._sheet.bfloat16 * (_USED if self._machine.has_gpu else 1.0)
        return {"seconds": beside(took, 8 * self._policy.weights * tokens / rate)}
