"""Measure what TLT costs in SGLang where nothing can be guessed.

`python -m benchmarks.sglang_foreign --out F.json [--repetitions 3]`

The policy has random weights and so has the drafter. Three servers answer the same number of
requests in turns: one without speculation (off), one that could speculate but never does (zero),
and TLT's, which has to find out that neither the drafter nor n-grams pay. Then whole jobs run with
SGLang, without speculation and with what a user gets by default.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch

from benchmarks.foreign_jobs import job_session, off_over_tlt, write_job
from benchmarks.foreign_workloads import WORKLOADS, Requests
from benchmarks.random_policy import random_drafter
from benchmarks.result import Claim, write_result
from benchmarks.sglang_speculation import (
    Server,
    compare,
    describe,
    options_for,
    ratio,
    start_server,
)
from tlt.base.strategies import Off
from tlt.engine.base import Request
from tlt.models.config_json import read_config
from tlt.models.drafter_folder import save_drafter

_WORKLOAD = WORKLOADS["nothing-to-guess"]
_SEED = 11
# rollouts by running requests: how many requests there are in all
_ROLLOUTS = {1: 8, 4: 16, 16: 32, 32: 48}
_MOST = 96
_JOB_SECONDS = 40.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        policy = write_job(_WORKLOAD, folder / "job", _SEED, "sglang").parent / "policy"
        drafter = folder / "drafter"
        save_drafter(random_drafter(read_config(policy), _SEED), drafter)
        kinds = {
            "off": None,
            "zero": options_for(policy, drafter, fixed=Off(), trained=False),
            "tlt": options_for(policy, drafter),
        }
        with ExitStack() as stack:
            servers: dict[str, Server] = {}
            for server, options in kinds.items():
                (folder / server).mkdir()
                started = start_server(policy, options, folder / server)
                servers[server] = Server(*started, _requests())
                stack.callback(servers[server].close)
            rollouts = {
                str(running): compare(
                    servers, tuple(servers), running, count, arguments.repetitions, _MOST
                )
                for running, count in _ROLLOUTS.items()
            }
        with job_session():
            jobs = off_over_tlt(_WORKLOAD, folder / "jobs", _SEED, "sglang", _JOB_SECONDS)
    claims = [
        Claim(
            name="sglang_foreign.zero_over_tlt_min",
            value=min(ratio(found, "tlt", "zero").estimate for found in rollouts.values()),
            unit="x",
            bar=0.97,
        ),
        Claim(name="sglang_foreign.jobs_off_over_tlt", value=jobs, unit="x", bar=0.97),
    ]
    details = {running: describe(found, "off") for running, found in rollouts.items()}
    rounded = [msgspec.structs.replace(claim, value=round(claim.value, 3)) for claim in claims]
    write_result(
        "sglang_foreign",
        rounded,
        {"running": details},
        time.monotonic() - began,
        arguments.out,
    )


def _requests() -> Callable[[int, int], Sequence[Request]]:
    blocks, requests = itertools.count(), Requests(_WORKLOAD, _SEED)

    def take(count: int, most: int) -> Sequence[Request]:
        block = requests.block(next(blocks), count)
        return [msgspec.structs.replace(request, max_new_tokens=most) for request in block]

    return take


if __name__ == "__main__":
    main()
