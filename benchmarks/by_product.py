"""Check that a job's exported drafter gains as much in SGLang as in the native engine.

`python -m benchmarks.by_product --out F.json`

A job of thirty steps starts with an untrained drafter, as in `benchmarks.e2e`; `tlt export` writes
its policy and its drafter. Both engines load these folders and answer held-out prompts greedily at
the same depth. The native engine also does so with the drafter as the job used it.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.result import Claim, write_result
from benchmarks.speculating import held_out_prompts
from benchmarks.stacks import run, session, tlt
from tlt.engine.base import Engine, NoiseKey, Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.engine.sglang.engine import SglangEngine
from tlt.engine.sglang.hidden_state_hooks import Proposal
from tlt.engine.sglang.shared_hidden_state_buffer import RequestName
from tlt.engine.sglang.speculation_options import SpeculationOptions
from tlt.engine.sglang.start_engine_with_tap import start_client
from tlt.export.drafter_export import read_drafter
from tlt.id_types import DrafterVersion, Member, PolicyVersion, PromptIndex, Step
from tlt.models.config_json import read_config
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.drafter_folder import load_drafter
from tlt.models.eagle_drafter import Drafter
from tlt.run_folder_reader import read_ledger
from tlt.strategies import Draft

_JOB = ("algorithm.steps=30", "algorithm.prompts_per_step=4")
_DEPTH = 4
_PROMPTS, _ANSWER = 48, 240
_SLOTS, _CONTEXT = 16, 512
_FIRST = PolicyVersion(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        with session():
            job = run("cold", 1, *_JOB)
            assert job.snapshot.job is not None
            for part in ("policy", "drafter"):
                tlt("export", part, job.snapshot.job, str(folder / part))
            used = _last_drafter(job.folder)
        requests = _requests()
        before = _native_accept_length(folder, used, requests)
        layers = read_config(folder / "policy").layers
        native = _native_accept_length(folder, load_drafter(folder / "drafter", layers), requests)
        sglang = _sglang_accept_length(folder, requests)
    assert job.snapshot.drafter_training is not None
    adopted = [m for m in job.snapshot.drafter_training.evaluations if m.adopted]
    claims = [
        Claim(
            name="by_product.apart",
            value=max(abs(length / before - 1.0) for length in (native, sglang)),
            unit="",
            bar=0.05,
            less_is_better=True,
        ),
        # two engines also agree on a useless drafter, so a minimum is required
        Claim(name="by_product.accept_length", value=before, unit="tokens a pass", bar=2.5),
    ]
    details = {
        "accept_length": {"as the job used it": before, "native": native, "sglang": sglang},
        "canary_in_the_job": [round(m.accept_length, 3) for m in adopted],
        "depth": _DEPTH,
        "prompts": _PROMPTS,
    }
    write_result("by_product", claims, details, time.monotonic() - began, out)


def _last_drafter(run: Path) -> Drafter:
    ledger = read_ledger(run)
    assert ledger.state.drafter.adoption.used is not None
    return read_drafter(run, ledger.spec, ledger.state.drafter.adoption.used)


def _requests() -> list[Request]:
    return [
        Request(
            id=index,
            prompt=tuple(prompt),
            key=NoiseKey(
                seed=0,
                step=Step(0),
                purpose="eval",
                prompt=PromptIndex(index),
                member=Member(0),
            ),
            sampling=Sampling(temperature=0.0),
            max_new_tokens=_ANSWER,
            stop_tokens=frozenset(),
        )
        for index, prompt in enumerate(held_out_prompts()[:_PROMPTS])
    ]


def _native_accept_length(folder: Path, drafter: Drafter, requests: Sequence[Request]) -> float:
    decoder = load_decoder(folder / "policy", torch.float32)
    chain = Draft(depth=_DEPTH, noise=False)
    engine = NativeEngine(
        decoder,
        decode_text=lambda tokens: "",
        slots=_SLOTS,
        max_context=_CONTEXT,
        device=torch.device("cpu"),
        version=_FIRST,
        captured=tuple(drafter.config.captured),
        arms=(chain,),
    )
    engine.speculation.adopt_drafter(DrafterVersion(0), drafter)
    engine.speculation.set_strategy(chain)
    _answer(engine, requests)
    tallies = [tally for tally in engine.take_strategy_tallies() if tally.strategy == chain]
    return sum(t.tokens for t in tallies) / sum(t.rows for t in tallies)


def _sglang_accept_length(folder: Path, requests: Sequence[Request]) -> float:
    config = read_config(folder / "policy")
    drafter = load_drafter(folder / "drafter", config.layers)
    trace, chain = folder / "proposals", Draft(depth=_DEPTH, noise=False)
    server, tap = start_client(
        folder / "policy",
        slots=_SLOTS,
        max_context=_CONTEXT,
        device=torch.device("cpu"),
        dtype=torch.float32,
        version=_FIRST,
        folder=folder,
        stuck_seconds=60,
        captured=(*drafter.config.captured,),
        speculation=SpeculationOptions(
            algorithm="EAGLE" if drafter.config.layout == "eagle" else "EAGLE3",
            drafter=str(folder / "drafter"),
            trained=True,
            layers=len(drafter.config.captured),
            arms=(chain,),
            fixed=chain,
        ),
        proposals=trace,
    )
    engine = SglangEngine(
        server, folder / "policy", tap, lambda tokens: "", _SLOTS, _CONTEXT, _FIRST
    )
    lengths = _answer(engine, requests)
    server.close()
    made = [msgspec.json.decode(line, type=Proposal) for line in trace.read_bytes().splitlines()]
    first = min(RequestName.read(proposal.name).serial for proposal in made)
    passes = 0
    for proposal in made:
        request = RequestName.read(proposal.name).serial - first
        # proposals beyond an answer's end are not counted as accepted
        passes += proposal.seen < len(requests[request].prompt) + lengths[request]
    # the prefill yields the first token of an answer
    return (sum(lengths.values()) - len(lengths)) / passes


def _answer(engine: Engine, requests: Sequence[Request]) -> dict[int, int]:
    engine.submit(list(requests))
    lengths: dict[int, int] = {}
    while engine.running:
        lengths |= {done.id: len(done.tokens) for done in engine.step()}
    return lengths


if __name__ == "__main__":
    main()
