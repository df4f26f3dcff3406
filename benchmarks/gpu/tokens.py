"""Check that the native engine draws the CPU's tokens in float64, and frees what it says."""

from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from functools import partial

import torch

from benchmarks.foreign_workloads import RandomPolicy, Requests, Workload, between, make_policy
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.outcomes import Check, Figures, beside
from benchmarks.random_policy import random_drafter
from tests.engine.reference import answers, finish
from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.base.strategies import Draft, Ngram, Off, Strategy
from tlt.engine.native import NativeEngine
from tlt.models.decoder_spec import Decoder
from tlt.trainer.drafter.samples import state_layers

_STRATEGIES: dict[str, Strategy] = {
    "off": Off(),
    "n-grams": Ngram(tokens=4),
    "draft with noise": Draft(depth=4),
    "draft": Draft(depth=4, noise=False),
}
_POLICY = RandomPolicy(family="qwen3", layers=4, hidden=128, vocabulary=500, logits=3.0)
_WORKLOAD = Workload(policy=_POLICY, rows=8, lengths=between(20, 60))
_SLOTS, _CONTEXT, _SWAP_AT, _SEED = 8, 512, 8, 5


@contextmanager
def checks(machine: Machine) -> Generator[Mapping[str, Check]]:
    yield {
        f"as on a CPU, {name}": partial(_compare, machine, strategy)
        for name, strategy in _STRATEGIES.items()
    }


def _compare(machine: Machine, strategy: Strategy) -> Figures:
    found, freed = _decode(machine.device, strategy)
    expected, _ = _decode(torch.device("cpu"), strategy)
    pairs = [pair for a, b in zip(found, expected, strict=True) for pair in zip(a, b, strict=False)]
    same = sum(a == b for a, b in pairs)
    assert found == expected, f"other tokens than on the CPU, and {same} equal ones"
    assert freed > 0, "no memory was freed"
    megabytes = round(freed / 1e6, 1)
    return {"same_tokens": beside(same, sum(map(len, expected))), "megabytes_freed": megabytes}


def _decode(device: torch.device, strategy: Strategy) -> tuple[list[list[int]], int]:
    """Decode two blocks: swap the weights amid one, and free the memory after it.

    Return the answers, and the bytes that were freed.
    """
    first, second = (Requests(_WORKLOAD, _SEED).block(number, 24) for number in (0, 1))
    with closing(_engine(device, strategy)) as engine:
        engine.submit(first)
        done = [completion for _ in range(_SWAP_AT) for completion in engine.step()]
        engine.swap_weights(PolicyVersion(1), _policy(2).weights)
        done += finish(engine).values()
        held = engine.memory_bytes
        engine.release_memory()
        freed = held - engine.memory_bytes
        done += answers(engine, second).values()
    return [completion.tokens for completion in done], freed


def _engine(device: torch.device, strategy: Strategy) -> NativeEngine:
    policy = _policy(1)
    drafter = random_drafter(policy.config, _SEED).double()
    engine = NativeEngine(
        policy,
        lambda tokens: "",
        _SLOTS,
        _CONTEXT,
        device,
        PolicyVersion(0),
        state_layers(drafter.config, policy.config.layers),
        [strategy],
    )
    engine.adopt_drafter(DrafterVersion(1), drafter)
    engine.speculation.set_strategy(strategy)
    return engine


def _policy(seed: int) -> Decoder:
    policy = make_policy(_WORKLOAD, seed)
    weights = {name: weight.double() for name, weight in policy.weights.items()}
    return Decoder(config=policy.config, weights=weights)
