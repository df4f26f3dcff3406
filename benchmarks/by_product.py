"""Check that a job's exported drafter gains as much in SGLang as in the native engine.

`python -m benchmarks.by_product --out F.json`

Two jobs start with an untrained drafter: one of thirty steps with the native engine, and the demo
with SGLang. `tlt export` writes the policy and the drafter of each. Both engines load these folders
and answer held-out prompts greedily at the same depth. The native engine also does so with the
drafter as the job used it.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from benchmarks.result import Claim, write_result
from benchmarks.stacks import ROOT, SPEC, run, session, tlt
from tlt.base.id_types import DrafterVersion, Member, PolicyVersion, PromptIndex, Step
from tlt.base.strategies import Draft
from tlt.data.dataset import read_rows
from tlt.engine.base import Engine, NoiseKey, Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.engine.sglang.client.start_engine_with_tap import start_client
from tlt.engine.sglang.shared.scheduler_options import Proposal, SpeculationOptions
from tlt.engine.sglang.shared.shared_hidden_state_buffer import RequestName
from tlt.models.config_json import read_config
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.drafter_folder import load_drafter
from tlt.models.eagle_drafter import Drafter
from tlt.models.tokenizer import Tokenizer
from tlt.runs.export.drafter_export import read_drafter
from tlt.runs.run_folder_reader import read_ledger
from tlt.spec.spec_files import load_job_spec

# by the engine of the job: its spec and what is changed in it
_JOBS: dict[str, tuple[Path, tuple[str, ...]]] = {
    "native": (SPEC, ("algorithm.steps=30", "algorithm.prompts_per_step=4")),
    "sglang": (
        ROOT / "configs" / "tiny-reasoner-sglang.yaml",
        ("algorithm.eval_every=0", "drafter.train=always"),
    ),
}
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
    found: dict[str, _Lengths] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, session():
        for engine, (spec, changes) in _JOBS.items():
            found[engine] = _measure(spec, changes, Path(name) / engine)
            print(f"job with {engine}: {found[engine]}", flush=True)
    claims: list[Claim] = []
    for engine, suffix in (("native", ""), ("sglang", "_of_sglang_job")):
        lengths = found[engine]
        apart = max(abs(own / lengths.used - 1.0) for own in (lengths.native, lengths.sglang))
        claims += [
            Claim(
                name=f"by_product.apart{suffix}",
                value=round(apart, 4),
                unit="",
                bar=0.05,
                less_is_better=True,
            ),
            # two engines also agree on a useless drafter, so a minimum is required
            Claim(
                name=f"by_product.accept_length{suffix}",
                value=round(lengths.used, 3),
                unit="tokens a pass",
                bar=2.5,
            ),
        ]
    details = {
        "accept_length_by_engine_of_the_job": {
            engine: {
                "as the job used it": lengths.used,
                "native": lengths.native,
                "sglang": lengths.sglang,
                "evaluations in the job": lengths.evaluations,
            }
            for engine, lengths in found.items()
        },
        "depth": _DEPTH,
        "prompts": _PROMPTS,
    }
    write_result("by_product", claims, details, time.monotonic() - began, out)


class _Lengths(NamedTuple):
    """Accept lengths: of the drafter as the job used it, exported to either engine, and before."""

    used: float
    native: float
    sglang: float
    evaluations: list[float]


def _measure(spec: Path, changes: Sequence[str], folder: Path) -> _Lengths:
    folder.mkdir()
    job = run("cold", 1, *changes, spec=spec)
    assert job.snapshot.job is not None
    assert job.snapshot.drafter_training is not None
    for part in ("policy", "drafter"):
        tlt("export", part, job.snapshot.job, str(folder / part))
    requests = _requests(spec)
    layers = read_config(folder / "policy").layers
    exported = load_drafter(folder / "drafter", layers)
    evaluations = [m for m in job.snapshot.drafter_training.evaluations if m.adopted]
    return _Lengths(
        used=_native_accept_length(folder, _last_drafter(job.folder), requests),
        native=_native_accept_length(folder, exported, requests),
        sglang=_sglang_accept_length(folder, requests),
        evaluations=[round(each.accept_length, 3) for each in evaluations],
    )


def _last_drafter(run: Path) -> Drafter:
    ledger = read_ledger(run)
    assert ledger.state.drafter.adoption.used is not None
    return read_drafter(run, ledger.spec, ledger.state.drafter.adoption.used)


def _requests(path: Path) -> list[Request]:
    spec = load_job_spec(path)
    tokenizer = Tokenizer(spec.policy.path)
    held_out = islice(read_rows(Path(str(spec.data.eval))), _PROMPTS)
    return [
        Request(
            id=index,
            prompt=tuple(tokenizer.prompt_tokens(row[spec.data.prompt_key], spec.data, "eval")),
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
        for index, (_, row) in enumerate(held_out)
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
