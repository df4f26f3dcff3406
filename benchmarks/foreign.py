"""Decode foreign workloads without speculation and with it, as a user gets it by default.

`python -m benchmarks.foreign --out F.json [--only NAME] [--part decoding]`

Each workload is decoded first and then run as whole jobs. For decoding it has two engines in one
process and one thread, which read the same weights in memory. They decode the same blocks of
requests to the end, taking turns of a twentieth of a second, because the machine's speed drifts.
They must give the same tokens, except after two whose perturbed logits tie in float32: the gap
between them in float64 is reported. What counts is CPU time. Speculation chooses with all of its
defaults, control runs included, and starts without knowledge, so the search is included. The
savings that a job would report are compared with those that the pairs show.
An engine that may speculate, but never does, is compared with one without speculation as well: its
savings are the costs of being able to.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import stdev
from typing import Any, NamedTuple

import msgspec
import torch

from benchmarks.foreign_claims import LEAST_OF_ONE, interval, make_claims, verdict
from benchmarks.foreign_jobs import job_session, off_over_tlt, transformers_policy
from benchmarks.foreign_workloads import (
    WORKLOADS,
    Requests,
    Workload,
    captured_layers,
    make_drafter,
    make_policy,
    sharpened,
)
from benchmarks.result import write_result
from tests.engine.reference import gap_at_the_fork, transformers_model
from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.base.strategies import Off, Strategy
from tlt.engine.base import Request
from tlt.engine.native import NativeEngine, engine
from tlt.engine.native.policy_forward import PolicyWeights
from tlt.models.decoder_spec import Decoder
from tlt.policies.speculation import savings_estimate
from tlt.policies.speculation.configured_policy import configured_policy
from tlt.policies.speculation.plain_replay import replay
from tlt.policies.speculation.savings_estimate import DecodeAccount
from tlt.spec.config import SpeculationSpec
from tlt.spec.spec_files import load_job_spec

_SPECULATION = SpeculationSpec(mode="adaptive")
_BLOCK_SECONDS = 2.0
# of neighbours of .03 s, the CPU time of the same work differs by 6 %, of .7 s by 11 %
_TURN_SECONDS = 0.05
# of the comparison: two engines differ, for as long as they live, by where their caches lie
_CACHES_ERROR = 0.01
# fixed beforehand: to stop at the first bound that passes would let too many pass
_PAIRS = 24
# the workload whose speculation is only claimed
_DISGUISED = "shallow"
# pairs with the same weights
_SAME_WEIGHTS = 2
# requests of a block are counted in batches of all rows
_MOST_BATCHES = 64
_CONTEXT = 1024
_Z95 = 1.96
_SEED = 11


class Window(NamedTuple):
    cpu: float
    wall: float
    tokens: int


class Fork(NamedTuple):
    """A request whose answer with speculation isn't the one without."""

    request: Request
    plain: Sequence[int]
    ours: Sequence[int]


class _Shared:
    """Let engines read the same weights in memory.

    Otherwise one of two equal engines may be 7 % slower for as long as it lives, by where its
    weights happen to lie.
    """

    def __init__(self) -> None:
        self._weights: PolicyWeights | None = None

    def __call__(self, *shape: Any) -> PolicyWeights:
        self._weights = self._weights or PolicyWeights(*shape)
        return self._weights

    @contextmanager
    def used(self) -> Generator[None]:
        own, engine.PolicyWeights = engine.PolicyWeights, self  # type: ignore[assignment]
        try:
            yield
        finally:
            engine.PolicyWeights = own


class _Side:
    """An engine that decodes blocks, with speculation or without."""

    def __init__(
        self, workload: Workload, policy: Decoder, speculates: bool, fixed: Strategy | None = None
    ) -> None:
        self._engine = NativeEngine(
            policy,
            decode_text=lambda tokens: "",
            slots=workload.rows,
            max_context=_CONTEXT,
            device=torch.device("cpu"),
            version=PolicyVersion(0),
            captured=captured_layers(policy) if speculates and workload.drafter is not None else (),
            arms=_SPECULATION.arms if speculates else (),
        )
        self._rows = workload.rows
        self._requests: Sequence[Request] = ()
        self._answers: dict[int, list[int]] = {}
        self.cpu = self.wall = 0.0
        self.account = DecodeAccount()
        # decode seconds by strategy, to explain a result
        self.by_strategy: dict[str, float] = {}
        if speculates:
            make = partial(configured_policy, fixed, _SPECULATION.control_share)
            self._engine.speculation.set_policy(make, _SEED)

    def swap_weights(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        self._engine.swap_weights(PolicyVersion(version), weights)

    def adopt(self, drafter: Any) -> None:
        self._engine.speculation.adopt_drafter(DrafterVersion(1), drafter)

    def start(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._answers = {}
        self.cpu = self.wall = 0.0
        self._engine.submit(requests)

    @property
    def ended(self) -> bool:
        return not self._engine.running

    def decode(self, seconds: float) -> None:
        """Decode until all requests have ended, or for some CPU seconds."""
        cpu, wall = time.process_time(), time.perf_counter()
        while self._engine.running and time.process_time() < cpu + seconds:
            self._answers |= {done.id: done.tokens for done in self._engine.step()}
        self.cpu += time.process_time() - cpu
        self.wall += time.perf_counter() - wall

    def finish(self) -> tuple[Window, dict[int, list[int]]]:
        tallies = self._engine.take_strategy_tallies()
        account = savings_estimate.add_tallies(self.account, tallies, beside_training=False)
        lengths = [len(self._answers[request.id]) for request in self._requests]
        replayed = replay(lengths, 1, self._rows, lambda rows: rows)
        self.account = savings_estimate.add_replay(account, replayed)
        for tally in tallies:
            name = "control" if tally.control is not None else str(tally.strategy)
            self.by_strategy[name] = self.by_strategy.get(name, 0.0) + tally.seconds
        return Window(self.cpu, self.wall, sum(lengths)), self._answers

    def close(self) -> None:
        self._engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=WORKLOADS, nargs="+")
    parser.add_argument("--block", type=float, default=_BLOCK_SECONDS, help="seconds of a block")
    parser.add_argument("--part", choices=["decoding", "jobs"], help="leave the other part out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    names, details = arguments.only or list(WORKLOADS), dict[str, Any]()
    if arguments.part is not None and arguments.out is not None:
        details = _other_part(arguments.part, arguments.out)
    if arguments.part != "jobs":
        details["decoding"] = decoding = dict[str, Any]()
        for name in names:
            decoding[name] = _decode_workload(WORKLOADS[name], arguments.block)
            print(name, {k: v for k, v in decoding[name].items() if k != "pairs"}, flush=True)
        if _DISGUISED in names:
            found = _decode_workload(WORKLOADS[_DISGUISED], arguments.block, fixed=Off())
            details["disguised"] = found
            print("disguised", {k: v for k, v in found.items() if k != "pairs"}, flush=True)
    if arguments.part != "decoding":
        details["jobs"] = _run_jobs(names)
    write_result("foreign", make_claims(details), details, time.monotonic() - began, arguments.out)


def _other_part(part: str, out: Path) -> dict[str, Any]:
    """Return what an earlier result says of the part that isn't measured now, and its commit."""
    if not out.exists():
        return {}
    earlier = msgspec.json.decode(out.read_bytes())
    kept = "jobs" if part == "decoding" else "decoding"
    keys = (kept,) if kept == "jobs" else (kept, "disguised")
    measured_at = earlier["details"].get(f"{kept}_measured_at", earlier["commit"])
    details = {key: earlier["details"][key] for key in keys if key in earlier["details"]}
    return details | {f"{kept}_measured_at": measured_at}


def _run_jobs(names: Sequence[str]) -> dict[str, list[float]]:
    """Return off / TLT of each workload's pairs; one that was much slower is repeated once."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="tlt-foreign-") as folder, job_session():
        for name in names:
            ratios = found.setdefault(name, [])
            while not ratios or (len(ratios) == 1 and ratios[0] < LEAST_OF_ONE):
                ratio = off_over_tlt(WORKLOADS[name], Path(folder) / name, _SEED)
                ratios.append(round(ratio, 4))
            print(name, "job off / TLT", ratios, flush=True)
    return found


def _decode_workload(
    workload: Workload, block_seconds: float, fixed: Strategy | None = None
) -> dict[str, Any]:
    """Decode in turns; `fixed` replaces the choice of strategies."""
    policy, requests = make_policy(workload, _SEED), Requests(workload, _SEED)
    with _Shared().used():
        off, tlt = _Side(workload, policy, False), _Side(workload, policy, True, fixed)
    if workload.drafter is not None:
        tlt.adopt(make_drafter(workload, policy, requests, _SEED))
    count = _requests_of_a_block(off, workload, requests, block_seconds)
    pairs: list[tuple[Window, Window]] = []
    gaps: list[float] = []
    for number in range(_PAIRS):
        factor = workload.sharpness[number // _SAME_WEIGHTS % len(workload.sharpness)]
        weights = sharpened(policy, factor)
        for side in (off, tlt):
            side.swap_weights(number + 1, weights)
        plain, ours, forks = _decode_in_turns(off, tlt, requests.block(number, count))
        pairs.append((plain, ours))
        gaps += _gaps(workload, Decoder(config=policy.config, weights=weights), forks)
    value, low, high = interval([math.log(plain.cpu / ours.cpu) for plain, ours in pairs])
    result = {
        "verdict": verdict(low, high),
        "off_over_tlt": round(value, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "wall": round(math.fsum(o.wall for o, _ in pairs) / math.fsum(t.wall for _, t in pairs), 4),
        "requests": count,
        "answers": _PAIRS * count,
        "gaps_of_different_answers": gaps,
        "tokens_per_second": round(pairs[0][0].tokens / pairs[0][0].cpu),
        "pairs": [(round(plain.cpu, 3), round(ours.cpu, 3)) for plain, ours in pairs],
        "seconds_by_strategy": {n: round(s, 2) for n, s in sorted(tlt.by_strategy.items())},
        "ledger": _ledger(tlt.account, pairs),
    }
    off.close()
    tlt.close()
    return result


def _decode_in_turns(
    off: _Side, tlt: _Side, block: Sequence[Request]
) -> tuple[Window, Window, list[Fork]]:
    """Let the side that took less time so far go next; return what each took and where they differ.

    Lengths of random policies are imposed, so answers that differ still have the same length.
    """
    for side in (off, tlt):
        side.start(block)
    while running := [side for side in (off, tlt) if not side.ended]:
        min(running, key=lambda side: side.cpu).decode(_TURN_SECONDS)
    (plain, answers), (ours, same) = off.finish(), tlt.finish()
    forks = [
        Fork(request, answers[request.id], same[request.id])
        for request in block
        if answers[request.id] != same[request.id]
    ]
    return plain, ours, forks


def _gaps(workload: Workload, policy: Decoder, forks: Sequence[Fork]) -> list[float]:
    """Return the gap in float64 where answers fork, for the policy that decoded them."""
    if not forks:
        return []
    if isinstance(workload.policy, Path):
        model = transformers_model(Path(load_job_spec(workload.policy / "job.yaml").policy.path))
    else:
        model = transformers_policy(workload.policy, policy).double()
    return [gap_at_the_fork(model, *fork) for fork in forks]


def _requests_of_a_block(off: _Side, workload: Workload, requests: Requests, seconds: float) -> int:
    """Decode until a block's duration is known."""
    batches, number = 1, 900_000
    while True:
        off.start(requests.block(number, workload.rows * batches))
        off.decode(math.inf)
        took = off.finish()[0].cpu
        if took >= seconds / 4 or batches >= _MOST_BATCHES:
            return max(1, round(batches * seconds / took)) * workload.rows
        batches, number = batches * 2, number + 1


def _ledger(account: DecodeAccount, pairs: Sequence[tuple[Window, Window]]) -> dict[str, Any]:
    """Compare the savings that a job would report with those that the pairs show."""
    off = math.fsum(plain.cpu for plain, _ in pairs)
    saved = [plain.cpu - ours.cpu for plain, ours in pairs]
    truth, error = math.fsum(saved), stdev(saved) * math.sqrt(len(saved))
    result: dict[str, Any] = {
        "off": round(off, 3),
        "truth": round(truth / off, 4),
        "truth_error": round(error / off, 4),
    }
    savings = savings_estimate.estimate_savings(account, open_seconds=0.0)
    if savings is None:
        return result
    total = savings.total
    claimed_error = (total.high - total.low) / 2 / _Z95
    unexplained = math.hypot(error, claimed_error, _CACHES_ERROR * off)
    errors = abs(total.seconds - truth) / unexplained
    return result | {
        "claim": round(total.seconds / off, 4),
        "claim_error": round(claimed_error / off, 4),
        "overhead": round(savings.overhead / off, 4),
        "runs": savings.runs,
        "standard_errors": round(errors, 2),
        "true": errors <= 2.0,
    }


if __name__ == "__main__":
    main()
