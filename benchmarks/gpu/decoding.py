"""Time decode steps of a real shape, and say how much of the device's bandwidth they use.

Speculation isn't timed here: on a GPU the native engine's steps may only launch kernels, and any
way to launch fewer of them would look like a gain.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch.profiler import ProfilerActivity, profile

from benchmarks.foreign_workloads import RandomPolicy, Requests, Workload, always
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Check, Figures, beside
from tlt.base.id_types import PolicyVersion
from tlt.engine.base import Request
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder

_ROWS = (1, 8, 32, 64)
_CONTEXT = 512
_WARM_UP, _TIMED, _PROFILED = 6, 20, 3
_LONGEST = 8


@contextmanager
def checks(machine: Machine) -> Generator[Mapping[str, Check]]:
    policy = load_decoder(machine.policy(), machine.dtype)
    engine = NativeEngine(
        policy, lambda tokens: "", max(_ROWS), _CONTEXT, machine.device, PolicyVersion(0)
    )
    weights = sum(weight.numel() for weight in policy.weights.values())
    yield {f"{rows} rows": partial(_measure, machine, engine, weights, rows) for rows in _ROWS}
    engine.close()


def _measure(machine: Machine, engine: NativeEngine, weights: int, rows: int) -> Figures:
    engine.submit(_requests(rows))
    seconds, busy, operations = _time_steps(machine, engine)
    engine.cancel(range(rows))
    engine.step()
    sheet, size = machine.sheet, weights * machine.dtype.itemsize
    launched = sum(calls for _, calls, _ in operations)
    # whatever takes longest: reading the weights, multiplying with them, launching
    bounds = (
        size / sheet.bandwidth,
        2 * weights * rows / sheet.bfloat16,
        launched * sheet.launch,
    )
    return {
        "step_ms": beside(1000 * seconds, 1000 * max(bounds)),
        "share_of_bandwidth": beside(bounds[0] / seconds, bounds[0] / max(bounds)),
        "tokens_per_second": round(rows / seconds),
        "operations_a_step": round(launched),
        "device_busy": round(busy / seconds, 3),
        "longest_ms": {
            name[:60]: round(1000 * took, 4)
            for name, _, took in sorted(operations, key=lambda one: -one[2])[:_LONGEST]
        },
    }


def _time_steps(
    machine: Machine, engine: NativeEngine
) -> tuple[float, float, list[tuple[str, float, float]]]:
    """Return the seconds of a step, those of its operations, and each one's calls and seconds."""
    for _ in range(_WARM_UP):
        engine.step()
    began = machine.now()
    for _ in range(_TIMED):
        engine.step()
    seconds = (machine.now() - began) / _TIMED
    kind = ProfilerActivity.CUDA if machine.has_gpu else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiled:
        for _ in range(_PROFILED):
            engine.step()
        machine.now()
    name = "self_device_time_total" if machine.has_gpu else "self_cpu_time_total"
    operations = [
        (event.key, event.count / _PROFILED, getattr(event, name) / _PROFILED / 1e6)
        for event in profiled.key_averages()
        if getattr(event, name) > 0
    ]
    return seconds, sum(took for _, _, took in operations), operations


def _requests(rows: int) -> Sequence[Request]:
    policy = RandomPolicy(layers=1, hidden=1, vocabulary=500, logits=1.0)
    workload = Workload(policy=policy, rows=rows, lengths=always(_CONTEXT // 2))
    return Requests(workload, seed=5).block(rows, rows)
