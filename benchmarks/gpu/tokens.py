"""Check that the native engine draws the CPU's tokens in float64, and frees what it says."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from benchmarks.foreign_workloads import RandomPolicy, Requests, Workload, between, make_policy
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Check, Figures, beside, require
from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.base.strategies import Draft, Ngram, Off, Strategy
from tlt.engine.base import Request
from tlt.engine.native import NativeEngine
from tlt.models.decoder_spec import Decoder
from tlt.models.eagle_drafter import Drafter
from tlt.trainer.drafter.initial_drafter import drafter_config_for, initialise_drafter
from tlt.trainer.drafter.samples import state_layers

_CPU = torch.device("cpu")
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
    policy, other = (_in_double(make_policy(_WORKLOAD, seed)) for seed in (1, 2))
    yield {
        **{
            f"as on a CPU, {name}": partial(_compare, machine, policy, other, strategy)
            for name, strategy in _STRATEGIES.items()
        },
        "memory freed for an update": partial(_free_memory, machine),
    }


def _compare(machine: Machine, policy: Decoder, other: Decoder, strategy: Strategy) -> Figures:
    """Decode on both devices, and swap the weights in the middle of answers."""
    requests = Requests(_WORKLOAD, _SEED).block(0, 24)
    found, expected = (
        _answers(_engine(policy, device, strategy), requests, other)
        for device in (machine.device, _CPU)
    )
    same = sum(
        a == b for id_, tokens in expected.items() for a, b in zip(found[id_], tokens, strict=False)
    )
    require(found == expected, f"other tokens than on the CPU, and {same} equal ones")
    return {"same_tokens": beside(same, sum(map(len, expected.values())))}


def _engine(policy: Decoder, device: torch.device, strategy: Strategy) -> NativeEngine:
    drafter = _random_drafter(policy)
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


def _free_memory(machine: Machine) -> Figures:
    """Free the cache and the states between two blocks of answers, which must be the same."""
    requests = Requests(_WORKLOAD, _SEED).block(0, 8)
    engine = _engine(make_policy(_WORKLOAD, _SEED), machine.device, _STRATEGIES["draft"])
    found: list[dict[int, list[int]]] = []
    held, seconds = [engine.memory_bytes], list[float]()
    for _ in range(2):
        found.append(_decode(engine, requests))
        began = machine.now()
        engine.release_memory()
        seconds.append(machine.now() - began)
        held.append(engine.memory_bytes)
    require(found[0] == found[1], "other tokens after memory was freed")
    freed = held[0] - held[1]
    require(freed > 0, "no memory was freed")
    return {"megabytes_freed": round(freed / 1e6, 1), "seconds_to_free": round(max(seconds), 4)}


def _answers(
    engine: NativeEngine, requests: Sequence[Request], other: Decoder
) -> dict[int, list[int]]:
    try:
        return _decode(engine, requests, other)
    finally:
        engine.close()


def _decode(
    engine: NativeEngine, requests: Sequence[Request], other: Decoder | None = None
) -> dict[int, list[int]]:
    """Decode; swap to the weights of another policy, if one is given, after some steps."""
    engine.submit(requests)
    done: dict[int, list[int]] = {}
    steps = 0
    while engine.running:
        if steps == _SWAP_AT and other is not None:
            engine.swap_weights(PolicyVersion(1), other.weights)
        done |= {completion.id: completion.tokens for completion in engine.step()}
        steps += 1
    return done


def _in_double(policy: Decoder) -> Decoder:
    weights = {name: weight.double() for name, weight in policy.weights.items()}
    return Decoder(config=policy.config, weights=weights)


def _random_drafter(policy: Decoder) -> Drafter:
    config = drafter_config_for(policy.config, "eagle")
    drafter = initialise_drafter(config, torch.ones(2 * policy.config.hidden), _SEED)
    return drafter.to(next(iter(policy.weights.values())).dtype)
