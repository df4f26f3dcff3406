"""Check the native engine against the CPU's in float64, and measure its decode steps."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from benchmarks.foreign_workloads import RandomPolicy, Requests, Workload, between, make_policy
from benchmarks.gpu.parts import Check, Figures, Machine, require
from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.base.strategies import Draft, Ngram, Off, Strategy
from tlt.engine.base import Request
from tlt.engine.native import NativeEngine
from tlt.models.decoder_spec import Decoder
from tlt.models.eagle_drafter import Drafter
from tlt.spec.config import SpeculationSpec
from tlt.trainer.drafter.initial_drafter import drafter_config_for, initialise_drafter
from tlt.trainer.drafter.samples import state_layers

_CPU = torch.device("cpu")
_ARMS = SpeculationSpec(mode="adaptive").arms
_STRATEGIES: dict[str, Strategy] = {
    "off": Off(),
    "n-grams": Ngram(tokens=4),
    "draft with noise": Draft(depth=4),
    "draft": Draft(depth=4, noise=False),
}
_SMALL = RandomPolicy(family="qwen3", layers=4, hidden=128, vocabulary=500, logits=3.0)
# the shape of Qwen2.5-0.5B
_LARGE = RandomPolicy(family="qwen2", layers=24, hidden=896, vocabulary=151_936, logits=3.0)
_ROWS = (1, 8, 32)
_CONTEXT = 512
_SWAP_AT, _WARM_UP, _TIMED = 8, 8, 24
_SEED = 5


@contextmanager
def checks(machine: Machine) -> Generator[Mapping[str, Check]]:
    policy = _SMALL if not machine.has_gpu else _LARGE
    yield {
        "same tokens as on a CPU": partial(_compare_tokens, machine),
        "decode steps": partial(_measure_steps, machine, policy),
        "memory freed for an update": partial(_free_memory, machine),
    }


def _compare_tokens(machine: Machine) -> Figures:
    """Decode with each strategy, and swap the weights in the middle of answers."""
    workload = Workload(policy=_SMALL, rows=8, lengths=between(20, 60))
    policy, other = (_in_double(make_policy(workload, seed)) for seed in (1, 2))
    requests = Requests(workload, _SEED).block(0, 24)
    drafter = _random_drafter(policy).double()
    compared = 0
    for name, strategy in _STRATEGIES.items():
        found, expected = (
            _answers(_engine(policy, device, 8, drafter), strategy, requests, other)
            for device in (machine.device, _CPU)
        )
        require(found == expected, f"{name}: other tokens than on the CPU")
        compared += sum(map(len, found.values()))
    return {"tokens": compared}


def _measure_steps(machine: Machine, policy: RandomPolicy) -> Figures:
    """Time steps with and without a drafter that guesses at random."""
    workload = Workload(policy=policy, rows=max(_ROWS), lengths=between(400, 400))
    made = make_policy(workload, 1)
    weights = {name: w.to(machine.dtype) for name, w in made.weights.items()}
    drafter = _random_drafter(made).to(machine.dtype)
    engine = _engine(Decoder(config=made.config, weights=weights), machine.device, 32, drafter)
    figures: Figures = {
        "dtype": str(machine.dtype),
        "bytes_beside_weights": engine.memory_bytes,
    }
    for rows in _ROWS:
        for name in ("off", "draft with noise"):
            engine.speculation.set_strategy(_STRATEGIES[name])
            engine.submit(Requests(workload, _SEED).block(rows, rows))
            for _ in range(_WARM_UP):
                engine.step()
            began = machine.now()
            for _ in range(_TIMED):
                engine.step()
            took = (machine.now() - began) / _TIMED
            figures[f"{name}, {rows} rows, ms a step"] = round(1000 * took, 3)
            engine.cancel(range(rows))
            engine.step()
    engine.close()
    if machine.has_gpu:
        figures["peak_bytes"] = torch.cuda.max_memory_allocated(machine.device)
    return figures


def _engine(policy: Decoder, device: torch.device, slots: int, drafter: Drafter) -> NativeEngine:
    layers = state_layers(drafter.config, policy.config.layers)
    engine = NativeEngine(
        policy,
        lambda tokens: "",
        slots,
        _CONTEXT,
        device,
        PolicyVersion(0),
        layers,
        [*_ARMS, *_STRATEGIES.values()],
    )
    engine.adopt_drafter(DrafterVersion(1), drafter)
    return engine


def _free_memory(machine: Machine) -> Figures:
    """Free the cache and the states between two blocks of answers, which must be the same."""
    workload = Workload(policy=_SMALL, rows=8, lengths=between(20, 60))
    policy = make_policy(workload, _SEED)
    requests = Requests(workload, _SEED).block(0, 8)
    engine = _engine(policy, machine.device, 8, _random_drafter(policy))
    engine.speculation.set_strategy(_STRATEGIES["draft"])
    found: list[dict[int, list[int]]] = []
    held, seconds = [engine.memory_bytes], list[float]()
    for _ in range(2):
        engine.submit(requests)
        done: dict[int, list[int]] = {}
        while engine.running:
            done |= {completion.id: completion.tokens for completion in engine.step()}
        found.append(done)
        began = machine.now()
        engine.release_memory()
        seconds.append(machine.now() - began)
        held.append(engine.memory_bytes)
    require(found[0] == found[1], "other tokens after memory was freed")
    freed = held[0] - held[1]
    require(freed > 0, "no memory was freed")
    return {"megabytes_freed": round(freed / 1e6, 1), "seconds_to_free": round(max(seconds), 4)}


def _answers(
    engine: NativeEngine, strategy: Strategy, requests: Sequence[Request], other: Decoder
) -> dict[int, list[int]]:
    engine.speculation.set_strategy(strategy)
    engine.submit(requests)
    done: dict[int, list[int]] = {}
    steps = 0
    while engine.running:
        if steps == _SWAP_AT:
            engine.swap_weights(PolicyVersion(1), other.weights)
        done |= {completion.id: completion.tokens for completion in engine.step()}
        steps += 1
    engine.close()
    return done


def _in_double(policy: Decoder) -> Decoder:
    weights = {name: weight.double() for name, weight in policy.weights.items()}
    return Decoder(config=policy.config, weights=weights)


def _random_drafter(policy: Decoder) -> Drafter:
    config = drafter_config_for(policy.config, "eagle")
    return initialise_drafter(config, torch.ones(2 * policy.config.hidden), _SEED)
