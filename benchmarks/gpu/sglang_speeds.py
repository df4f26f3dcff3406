"""Compare SGLang with TLT's speculation and without it, on a real shape.

The weights are random. At temperature 1 nothing can be guessed of them, so that the ratio is what
speculation costs. Greedily they repeat themselves, which n-grams guess.
"""

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Check, Figures, beside, require
from benchmarks.gpu.sglang_engine import make_requests, start
from benchmarks.sglang_speculation import Server, compare, ratio
from tlt.engine.base import Request

# by the requests that run: how many there are in all
_GPU, _CPU = {1: 2, 8: 24, 32: 64}, {2: 4}
_MOST, _REPETITIONS = (256, 3), (48, 1)
# a job that may speculate costs at most 3 % more; on CPUs with 16 layers loops were decoded 2.2
# times as fast at 4 and 8 requests
_NOTHING_TO_GUESS, _LOOPS = 1 / 1.03, 2.2


@contextmanager
def checks(machine: Machine) -> Generator[Mapping[str, Check]]:
    with ExitStack() as stack:
        clients = {
            name: start(machine, machine.folder / f"sglang-{name}", speculates=name == "tlt")
            for name in ("off", "tlt")
        }

        def servers(temperature: float) -> dict[str, Server]:
            def take(count: int, most: int) -> list[Request]:
                return make_requests(count, most, temperature)

            return {
                name: Server(*started, take, machine.device) for name, started in clients.items()
            }

        for server in servers(0.0).values():
            stack.callback(server.close)
        yield {
            "nothing to guess": partial(_compare, machine, servers(1.0), _NOTHING_TO_GUESS),
            "loops": partial(_compare, machine, servers(0.0), _LOOPS),
        }


def _compare(machine: Machine, servers: dict[str, Server], predicted: float) -> Figures:
    figures: Figures = {}
    most, repetitions = _MOST if machine.has_gpu else _REPETITIONS
    for running, count in (_GPU if machine.has_gpu else _CPU).items():
        found = compare(servers, ("off", "tlt"), running, count, repetitions, most)
        require(all(r.tokens > 0 for rollouts in found.values() for r in rollouts), "no tokens")
        speed = ratio(found, "tlt", "off").estimate
        figures[f"{running} running, times the speed of off"] = beside(speed, predicted)
    return figures
