"""Run a step of a whole job, in a session with Ray and Redis, with TLT and without."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial

from benchmarks.gpu.parts import Check, Figures, Machine, require
from benchmarks.stacks import run, session

_CHANGES = ("algorithm.steps=2", "algorithm.prompts_per_step=4", "algorithm.group_size=8")


@contextmanager
def checks(machine: Machine) -> Generator[Mapping[str, Check]]:
    with session(workers=1, device=machine.device.type):
        yield {
            f"{engine}, {name}": partial(_run_job, engine, stack)
            for engine in ("native", "sglang")
            for name, stack in (("without TLT", "off"), ("with TLT", "cold"))
        }


def _run_job(engine: str, stack: str) -> Figures:
    job = run(stack, 1, *_CHANGES, f"rollout.engine={engine}")
    require(len(job.steps) == 2, f"{len(job.steps)} steps")
    return {
        "steps": [{"rollout": round(s.rollout, 2), "rest": round(s.rest, 2)} for s in job.steps]
    }
