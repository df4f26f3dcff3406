"""Say what pays against long answers, and compare the simulator with what was measured.

Four parts: seconds of a step with lengths of DAPO-Math's shape; the paper's speed-ups by the size
of the cluster; seconds of the second half of real runs, whose lengths and learned tokens are given,
by the costs of the first half; a step of 4,096 workers in each mode.
`python -m benchmarks.simulate [--run FOLDER ...] --out F.json`
"""

import argparse
import gzip
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from benchmarks.result import Claim, at_most, write_result
from cli.simulate import read_fit
from tlt.report.statistics import mean
from tlt.simulation.comparison import Comparison, compare, simulate
from tlt.simulation.inputs import (
    Curve,
    DraftCosts,
    EngineCosts,
    Inputs,
    LengthSpec,
    UpdateCosts,
    interpolate,
)
from tlt.simulation.job import Job, Mode, rollout_seconds
from tlt.simulation.run_fit import StepRecord
from tlt.spec.spec_files import load_job_spec

_ROOT = Path(__file__).resolve().parent.parent
_RECORDED = _ROOT / "docs" / "recorded"
_STEPS = 20

# --- read: arXiv 2511.16665, as transcribed twice (its speed-ups by batch: twice in part)
# speed-ups of end-to-end steps by nodes of eight H100
_PAPER_7B = {1: 1.21, 2: 1.45, 4: 1.62, 8: 1.76}
_PAPER_32B = {4: 1.83, 8: 2.12}
# the faster of 16 and 64 verified tokens, 32B; a 7B model decodes 165 and 430 tokens/s at batch 1
_GAIN_32B: Curve = {1: 3.62, 2: 3.38, 4: 3.01, 8: 2.73, 16: 2.67, 32: 2.48}
_TOKENS_A_SECOND, _GAIN_AT_1 = 165.0, 2.61
# it speculates with at most 32 rows
_MOST_ROWS = 32
# DAPO (arXiv 2503.14476): answers of up to 16,384 tokens and a buffer of 4,096; groups of 16
_CAP, _GROUP = 20_480, 16

# --- assumed
# the 99th percentile is ten times the median, as reasoning models' answers are often reported
_LENGTHS = LengthSpec(median=3000.0, sigma=math.log(10.0) / 2.326, shared=0.5)
# H100: 3.35 TB/s and 989 TFLOPS; decoding gets 80 % of the one and 60 % of the other, training 40 %
_BYTES_A_SECOND, _DECODE_FLOPS, _TRAINING_FLOPS = 0.8 * 3.35e12, 0.6 * 989e12, 0.4 * 989e12
# passes over a token in an update: forward, twice as much backward, and the log-probs before it
_PASSES = 4
_PUBLISHING = 5.0
# groups of a step: those of configs/qwen3-8b-dapo-math.yaml
_PROMPTS = 64


class _Model(NamedTuple):
    parameters: float
    # keys and values of a token
    cache_bytes: int

    def engine(self, devices: int) -> EngineCosts:
        """Return what decoding in bfloat16 costs: a step reads all weights and the whole cache."""
        flops, weights = 2 * self.parameters, 2 * self.parameters
        row = flops / _DECODE_FLOPS / devices
        single = weights / _BYTES_A_SECOND / devices + _STEP_SECONDS
        return EngineCosts(
            plain={rows: single + row * (rows - 1) for rows in (1.0, 256.0)},
            cached_token=self.cache_bytes / _BYTES_A_SECOND / devices,
            prefill_token=flops / _TRAINING_FLOPS / devices,
            prompt_tokens=200,
        )

    def update(self) -> UpdateCosts:
        token = _PASSES * 2 * self.parameters / _TRAINING_FLOPS
        return UpdateCosts(token=token, seconds=_PUBLISHING)


_QWEN_7B, _QWEN_32B = _Model(7.6e9, 57_344), _Model(32.5e9, 262_144)
# so that a 7B model decodes as many tokens a second at batch 1 as were read
_STEP_SECONDS = 1.0 / _TOKENS_A_SECOND - 2 * _QWEN_7B.parameters / _BYTES_A_SECOND


def _drafts(gains: Curve, engine: EngineCosts) -> DraftCosts:
    """Return steps as long as plain ones that gain what was measured; none beyond 32 rows."""
    gains = {**gains, _MOST_ROWS + 1: 1.0}
    seconds = {rows: interpolate(engine.plain, rows) for rows in gains}
    return DraftCosts(seconds=seconds, tokens=gains)


def dapo_job(
    model: _Model = _QWEN_7B, gains: Curve | None = None, prompts: int = _PROMPTS, devices: int = 1
) -> Job:
    spec = load_job_spec(_ROOT / "configs" / "qwen3-8b-dapo-math.yaml")
    spec = replace(
        spec,
        algorithm=replace(spec.algorithm, prompts_per_step=prompts, group_size=_GROUP),
        rollout=replace(spec.rollout, slots="auto", max_new_tokens=_CAP),
    )
    engine = model.engine(devices)
    inputs = Inputs(
        lengths=_LENGTHS,
        engine=engine,
        drafts=(_drafts(gains or _gains_7b(), engine),),
        update=model.update(),
    )
    return Job(spec=spec, inputs=inputs, workers=16, steps=_STEPS)


def _gains_7b() -> Curve:
    """Return the 32B model's gains by batch, scaled to the 7B model's at batch 1."""
    return {rows: gain * _GAIN_AT_1 / _GAIN_32B[1] for rows, gain in _GAIN_32B.items()}


# --- the paper's table


class _Cluster:
    """Rollouts by nodes with and without speculation, and the tokens that updates share."""

    def __init__(self, job: Job, nodes: Sequence[int], workers_a_node: int) -> None:
        self.rollouts: dict[int, tuple[float, float]] = {}
        self.tokens: dict[int, float] = {}
        free = replace(job, steps=3, inputs=replace(job.inputs, update=UpdateCosts()))
        for count in nodes:
            sized = replace(free, workers=count * workers_a_node)
            found = [simulate(replace(sized, mode=Mode(speculates=each))) for each in (False, True)]
            self.rollouts[count] = (found[0][0].now, found[1][0].now)
            self.tokens[count] = found[0][1].tokens / sized.workers

    def speed_up(self, nodes: int, token: float) -> float:
        plain, fast = self.rollouts[nodes]
        update = token * self.tokens[nodes]
        return (plain + update) / (fast + update)

    def fit_token(self, measured: dict[int, float]) -> tuple[float, float]:
        """Return the squared error and the seconds of a token in an update that fit best."""
        tried = (1e-7 * 1.05**power for power in range(220))
        return min((self._error(token, measured), token) for token in tried)

    def _error(self, token: float, measured: dict[int, float]) -> float:
        return sum((self.speed_up(n, token) / known - 1) ** 2 for n, known in measured.items())


def _fit(clusters: dict[int, _Cluster], measured: dict[int, float]) -> tuple[int, float]:
    """Return the cluster, by its key, and the seconds of a token in an update that fit best."""
    fits = {key: cluster.fit_token(measured) for key, cluster in clusters.items()}
    key = min(fits, key=lambda each: fits[each][0])
    return key, fits[key][1]


def _paper_table() -> dict[str, Any]:
    sizes = {
        prompts: _Cluster(dapo_job(prompts=prompts), list(_PAPER_7B), 8)
        for prompts in (16, 32, 64, 128)
    }
    prompts, token = _fit(sizes, {nodes: _PAPER_7B[nodes] for nodes in (1, 8)})
    widths = {
        devices: _Cluster(
            dapo_job(_QWEN_32B, _GAIN_32B, prompts, devices), list(_PAPER_32B), 8 // devices
        )
        for devices in (2, 4, 8)
    }
    devices, large_token = _fit(widths, {4: _PAPER_32B[4]})
    small, large = sizes[prompts], widths[devices]
    return {
        "read": {
            "7b": _PAPER_7B,
            "32b": _PAPER_32B,
            "7b_gains": _gains_7b(),
            "32b_gains": _GAIN_32B,
        },
        "fitted": {
            "to": "7B at 1 and 8 nodes, 32B at 4",
            "prompts_a_step": prompts,
            "update_seconds_a_token_7b": token,
            "devices_an_engine_32b": devices,
            "update_seconds_a_token_32b": large_token,
        },
        "simulated": {
            "7b": {nodes: round(small.speed_up(nodes, token), 3) for nodes in _PAPER_7B},
            "32b": {nodes: round(large.speed_up(nodes, large_token), 3) for nodes in _PAPER_32B},
        },
    }


def _worst_forecast(table: dict[str, Any]) -> float:
    found = table["simulated"]
    errors = [abs(found["7b"][nodes] / _PAPER_7B[nodes] - 1) for nodes in (2, 4)]
    return max(*errors, abs(found["32b"][8] / _PAPER_32B[8] - 1))


# --- real runs


def _forecast(folder: Path) -> dict[str, Any]:
    """Forecast the second half of a run's steps from the first."""
    fit = read_fit(folder)
    steps = fit.whole_steps()
    known, later = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    job = fit.job(known)
    rollouts = sum(rollout_seconds(job, each.groups) for each in later)
    updates = sum(_update_seconds(job, known, each) for each in later)
    seen = sum(each.rollout for each in later), sum(each.update for each in later)
    return {
        "run": folder.name,
        "speculates": job.mode.speculates,
        "steps": len(later),
        "rollouts": {"forecast": rollouts, "seconds": seen[0], "error": rollouts / seen[0] - 1},
        "updates": {"forecast": updates, "seconds": seen[1]},
        "error": (rollouts + updates) / sum(seen) - 1,
    }


def _update_seconds(job: Job, known: Sequence[StepRecord], step: StepRecord) -> float:
    share = sum(each.learned for each in known) / sum(each.tokens for each in known)
    return job.inputs.update.seconds_of(round(step.learned / share), job.workers)


def _runs(folders: Sequence[Path]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tlt-bench-") as folder:
        recorded = Path(folder) / "recorded"
        recorded.mkdir()
        shutil.copy(_RECORDED / "spec.json", recorded)
        journal = gzip.decompress((_RECORDED / "journal.jsonl.gz").read_bytes())
        (recorded / "journal.jsonl").write_bytes(journal)
        yield recorded
    yield from folders


# --- other lengths


def _sensitivity(job: Job) -> dict[str, str]:
    """Return the advice for 16 workers if the lengths are less like those assumed."""
    lengths = {
        "sigma 0.7": replace(_LENGTHS, sigma=0.7),
        "sigma 1.3": replace(_LENGTHS, sigma=1.3),
        "nothing shared in a group": replace(_LENGTHS, shared=0.0),
        "most shared in a group": replace(_LENGTHS, shared=0.8),
    }
    jobs = {
        name: replace(job, steps=8, inputs=replace(job.inputs, lengths=each))
        for name, each in lengths.items()
    }
    return {name: compare(each, [16]).advice[16] for name, each in jobs.items()}


# --- many workers


def _slowest_step() -> float:
    """Return the CPU time of a step of 4,096 workers in the mode that takes longest."""
    job = replace(dapo_job(prompts=4096 * 8 // _GROUP), workers=4096, steps=2)
    modes = Mode(), Mode(defer_long=0.5), Mode(partial=0.5), Mode(ahead=True)
    seconds: list[float] = []
    for mode in modes:
        began = time.process_time()
        simulate(replace(job, mode=mode))
        seconds.append((time.process_time() - began) / job.steps)
    return max(seconds)


# --- claims


def _claims(compared: Comparison, workers: int) -> list[Claim]:
    outcomes = [each for each in compared.outcomes if each.workers == workers]
    best = min(outcomes, key=lambda each: each.seconds)
    alone = next(each for each in outcomes if each.mode == Mode(speculates=True))
    beyond, name = alone.seconds / best.seconds, f"dapo.{workers}"
    return [
        Claim(name=f"{name}.together", value=round(best.speed_up, 3), unit="x", bar=2.5),
        Claim(name=f"{name}.over_tlt", value=round(beyond, 3), unit="x", bar=1.3),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, action="append", default=[])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began = time.perf_counter()
    job = dapo_job()
    compared = compare(job, [16, 64])
    table = _paper_table()
    runs = [_forecast(folder) for folder in _runs(arguments.run)]
    claims = [
        *_claims(compared, 16),
        *_claims(compared, 64),
        at_most("paper.worst_forecast", 100 * _worst_forecast(table), "%", 10.0),
        at_most("runs.mean_error", 100 * mean([abs(each["error"]) for each in runs]), "%", 10.0),
        at_most("4096_workers.seconds", _slowest_step(), "s", 60.0),
    ]
    details = {
        "dapo": {
            "read": {"cap": _CAP, "group": _GROUP, "tokens_a_second_at_1": _TOKENS_A_SECOND},
            "assumed": msgspec.to_builtins(job.inputs),
            "advice": compared.advice,
            "advice_with_other_lengths": _sensitivity(job),
            "outcomes": msgspec.to_builtins(compared.outcomes),
        },
        "paper": table,
        "runs": runs,
    }
    write_result("simulate", claims, details, time.perf_counter() - began, arguments.out)


if __name__ == "__main__":
    main()
