"""Time decode steps of a real shape, and say how much of the device's bandwidth they use.

Speculation isn't timed here: on a GPU the native engine's steps may only launch kernels, and any
way to launch fewer of them would look like a gain.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial

from torch.profiler import ProfilerActivity, profile

from benchmarks.foreign_workloads import RandomPolicy, Requests, Workload, always
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.outcomes import Check, Figures, beside
from tlt.base.id_types import PolicyVersion
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder

_ROWS, _CONTEXT, _LONGEST = (1, 8, 32, 64), 512, 8
_WARM_UP, _TIMED, _PROFILED = 6, 20, 3


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
    policy = RandomPolicy(layers=1, hidden=1, vocabulary=500, logits=1.0)
    workload = Workload(policy=policy, rows=rows, lengths=always(_CONTEXT // 2))
    engine.submit(Requests(workload, seed=5).block(rows, rows))
    for _ in range(_WARM_UP):
        engine.step()
    seconds = machine.seconds_of(engine.step, _TIMED)
    calls, operations = _profile(machine, engine)
    engine.cancel(range(rows))
    engine.step()
    sheet, size = machine.sheet, weights * machine.dtype.itemsize
    # whatever takes longest: reading the weights, multiplying with them, launching
    bounds = size / sheet.bandwidth, 2 * weights * rows / sheet.bfloat16, calls * sheet.launch
    longest = sorted(operations, key=lambda name: -operations[name])[:_LONGEST]
    return {
        "step_ms": beside(1000 * seconds, 1000 * max(bounds)),
        "share_of_bandwidth": beside(bounds[0] / seconds, bounds[0] / max(bounds)),
        "operations_a_step": round(calls),
        "device_busy": round(sum(operations.values()) / seconds, 3),
        "longest_ms": {name[:60]: round(1000 * operations[name], 4) for name in longest},
    }


def _profile(machine: Machine, engine: NativeEngine) -> tuple[float, dict[str, float]]:
    """Return the operations of a step: how many there are, and the seconds of each kind."""
    kind, total = ProfilerActivity.CPU, "self_cpu_time_total"
    if machine.has_gpu:
        kind, total = ProfilerActivity.CUDA, "self_device_time_total"
    with profile(activities=[kind]) as profiled:
        for _ in range(_PROFILED):
            engine.step()
        machine.now()
    events = [event for event in profiled.key_averages() if getattr(event, total) > 0]
    calls = sum(event.count for event in events) / _PROFILED
    return calls, {event.key: getattr(event, total) / _PROFILED / 1e6 for event in events}
