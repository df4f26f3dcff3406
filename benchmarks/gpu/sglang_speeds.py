"""Compare speculation in SGLang with servers without it and with SGLang's own policy."""

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

from benchmarks.gpu.parts import Check, Figures, Machine, require
from benchmarks.sglang_speculation import START, Server, compare, ratio
from benchmarks.speculating import Requests


class _Size(NamedTuple):
    # how many requests there are in all, by those that run
    rollouts: Mapping[int, int]
    drained: int
    # most tokens of an answer
    most: int
    repetitions: int


_GPU = _Size({1: 8, 4: 32, 8: 64, 16: 96, 32: 128}, 32, 384, 3)
_CPU = _Size({2: 4}, 4, 48, 1)


@contextmanager
def checks(machine: Machine) -> Generator[Mapping[str, Check]]:
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, start in START.items():
            (folder := machine.folder / name).mkdir()
            client, tap = start(folder, machine.device, machine.dtype)
            servers[name] = Server(client, tap, Requests(seed=1).take, machine.device)
            stack.callback(servers[name].close)
        size = _GPU if machine.has_gpu else _CPU
        yield {
            "speculation by batch size": partial(_compare_sizes, servers, size),
            "drain against SGLang's policy": partial(_drain, servers, size),
        }


def _compare_sizes(servers: dict[str, Server], size: _Size) -> Figures:
    figures: Figures = {}
    for running, count in size.rollouts.items():
        found = compare(
            servers, ("off", "zero", "tlt"), running, count, size.repetitions, size.most
        )
        require(all(r.tokens > 0 for rollouts in found.values() for r in rollouts), "no tokens")
        for name in ("zero", "tlt"):
            speed = ratio(found, name, "off").estimate
            figures[f"{name}, {running} running, times the speed of off"] = round(speed, 3)
    return figures


def _drain(servers: dict[str, Server], size: _Size) -> Figures:
    found = compare(
        servers, ("upstream", "tlt"), size.drained, size.drained, size.repetitions, size.most
    )
    return {"times_the_speed_of_upstream": round(ratio(found, "tlt", "upstream").estimate, 3)}
