"""Run a step of a whole job, in a session with Ray and Redis, with TLT and without."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.outcomes import Check, Figures
from benchmarks.random_policy import write_job
from benchmarks.stacks import run, session

_STEPS = 2


@contextmanager
def _checks(machine: Machine, engine: str) -> Generator[Mapping[str, Check]]:
    folder = machine.folder / f"jobs-{engine}"
    spec = write_job(
        folder,
        "gpu",
        policy={"path": str(machine.policy()), "max_context": 512},
        # compiling may take minutes
        algorithm={"steps": _STEPS, "prompts_per_step": 4, "group_size": 8, "compile": False},
        rollout={"engine": engine, "max_new_tokens": 200, "slots": 16},
    )
    with session(workers=1, device=machine.device.type, folder=folder):
        yield {
            name: partial(_run_job, spec, stack)
            for name, stack in (("without TLT", "off"), ("with TLT", "cold"))
        }


def _run_job(spec: Path, stack: str) -> Figures:
    steps = run(stack, 1, spec=spec).steps
    assert len(steps) == _STEPS, f"{len(steps)} steps"
    return {
        "rollout_seconds": [round(step.rollout, 2) for step in steps],
        "other_seconds": [round(step.rest, 2) for step in steps],
    }


native = partial(_checks, engine="native")
sglang = partial(_checks, engine="sglang")
